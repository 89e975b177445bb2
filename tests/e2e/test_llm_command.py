"""The `llm` command of PyPI with our server as one of its OpenAI-compatible models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ServerProcess

if importlib.util.find_spec("llm") is None:  # not imported here: it would load plugins that are installed beside it
    pytest.skip("llm is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "12")
MODELS = """
- model_id: tiny
  model_name: default
  api_base: {url}/v1
  supports_tools: true
  supports_schema: true
- model_id: tiny-text
  model_name: default
  api_base: {url}/v1
  completion: true
- model_id: nobody
  model_name: nobody
  api_base: {url}/v1
"""
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]}

# The random model has to choose between the schema and a call: some seed makes one. Its result is sent back.
TOOL_SCRIPT = """
import llm

def get_weather(city: str = "Rome") -> str:
    "The weather in a city."
    return f"sunny in {city}"

for seed in range(40):
    talk = llm.get_model("tiny").conversation(tools=[get_weather])
    answer = talk.prompt("hello", schema={"enum": ["no"]}, stream=False, seed=seed, temperature=1, max_tokens=100)
    if answer.tool_calls():
        break
results = answer.execute_tool_calls()
last = talk.prompt("", tool_results=results, stream=False, temperature=0, max_tokens=8)
assert last.text() or last.tool_calls()
print(f"{results[0].name}: {results[0].output}")
"""


@pytest.fixture
def environment(tiny_server: ServerProcess, tmp_path: Path) -> dict[str, str]:
    """A folder of its own for llm's settings and logs, and none of the plugins that are installed beside it."""
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=tiny_server.url))
    return os.environ | {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "none"}


def llm(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def ask(environment: dict[str, str], *arguments: str) -> str:
    done = llm(environment, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def logged(environment: dict[str, str]) -> dict[str, Any]:
    """What llm noted of the newest exchange."""
    [entry] = json.loads(ask(environment, "logs", "-n", "1", "--json"))
    return dict(entry)


def test_prompts_streams_and_conversations(environment: dict[str, str]) -> None:
    whole = ask(environment, "-m", "tiny", *GREEDY, "--no-stream", "hello")
    assert whole.strip()
    assert ask(environment, "-m", "tiny", *GREEDY, "hello") == whole
    entry = logged(environment)
    assert entry["response"] == whole.removesuffix("\n")
    assert entry["input_tokens"] > 0
    assert 0 < entry["output_tokens"] <= 12
    assert ask(environment, "-m", "tiny", *GREEDY, "-s", "Be kind.", "hello") != whole
    assert ask(environment, "-c", *GREEDY, "and then?").strip()
    assert logged(environment)["input_tokens"] > entry["input_tokens"], "the conversation goes along"


def test_a_model_for_texts(environment: dict[str, str]) -> None:
    assert ask(environment, "-m", "tiny-text", *GREEDY, "hello").strip()


def test_a_schema(environment: dict[str, str]) -> None:
    answer = ask(environment, "-m", "tiny", "-o", "max_tokens", "200", "--schema", json.dumps(CITY), "hello")
    assert json.loads(answer)["city"] in ("Rome", "Oslo")


def test_a_tool(environment: dict[str, str]) -> None:
    """By the library, which the command is made of: one process for all seeds."""
    done = subprocess.run(
        [sys.executable, "-c", TOOL_SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("get_weather: sunny in")


def test_errors(environment: dict[str, str]) -> None:
    missing = llm(environment, "-m", "nobody", "hello")
    assert missing.returncode == 1
    assert "there is no model 'nobody'" in missing.stderr
    assert "Traceback" not in missing.stderr
    long = llm(environment, "-m", "tiny", "x" * 9000)
    assert long.returncode == 1
    assert "maximum context length" in long.stderr
