"""What the commands for a running server send to it, and what they print: by their own command lines.

`tests/e2e/test_cli.py` and `test_terminal.py` have them with a real server.
"""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.cli.main import main
from tests.support.recording import RecordingServer, recording_server

KEY = "sk-test"


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with recording_server() as found:
        yield found


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(server: RecordingServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PARALLM_API_KEY", raising=False)

    def command(*words: str, stdin: str = "", key: str | None = KEY, url: str | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        where = ["--url", url or server.url] + (["--api-key", key] if key else [])
        code = main([*words, *where])
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return command


# parallm adapters


def adapter(**fields: Any) -> dict[str, Any]:
    told = {"name": "math", "version": 3, "current": True, "pinned": False, "rank": 16, "bytes": 3 << 19}
    return told | {"requests": 7, "generated_tokens": 91, "pinned_requests": 2, "source": "folder/math", **fields}


def test_adapters_are_listed_with_their_numbers(server: RecordingServer, run: Any) -> None:
    server.answers["GET /v1/adapters"] = {"data": []}
    for words in (("adapters",), ("adapters", "list")):
        found = run(*words)
        assert (found.code, found.out) == (0, "no adapters are loaded\n")
    assert server.last.headers["authorization"] == f"Bearer {KEY}"
    server.answers["GET /v1/adapters"] = {"data": [adapter(), adapter(name="old", current=False, pinned=True)]}
    found = run("adapters", "list")
    math, old = [line.split("│") for line in found.out.splitlines() if "math" in line or "old" in line]
    assert [one.strip() for one in math[1:-1]] == ["math", "3", "current", "16", "1.5", "7", "91", "2", "folder/math"]
    assert old[3].strip() == "pinned"
    assert "MiB" in found.out


def test_adapters_are_changed_by_name(server: RecordingServer, run: Any, tmp_path: Path) -> None:
    published = {"policy_version": 4, "name": "math", "status": "success", "message": ""}
    for path in ("/load_adapter", "/v1/adapters/upload", "/v1/adapters/rollback", "/v1/adapters/pin"):
        server.answers[f"POST {path}"] = published
    server.answers |= {"POST /v1/adapters/unpin": published, "POST /v1/adapters/unload": published}
    assert run("adapters", "load", "math", "some/folder").out == "math@4 is published\n"
    assert server.last.json == {"name": "math", "path": "some/folder", "version": None}
    run("adapters", "load", "math", "some/folder", "--version", "9")
    assert server.last.json["version"] == 9
    (tmp_path / "adapters.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text('{"rank": 4}')
    assert run("adapters", "upload", "math", str(tmp_path)).out == "math@4 is published\n"
    for part in (b'name="name"', b"math", b'name="version"', b"next", b"weights", b'{"rank": 4}'):
        assert part in server.last.body
    run("adapters", "upload", "math", str(tmp_path), "--version", "6")
    assert b"\r\n\r\n6\r\n" in server.last.body
    assert run("adapters", "rollback", "math", "3").out == "math means version 4 now\n"
    assert server.last.json == {"name": "math", "version": 3}
    assert run("adapters", "pin", "math").out == "math is pinned\n"
    assert server.last.json == {"name": "math", "version": None}
    assert run("adapters", "unpin", "math", "2").out == "math is no longer pinned\n"
    assert server.last.json == {"name": "math", "version": 2}
    assert run("adapters", "unload", "math").out == "math is unloaded\n"
    assert (server.last.path, server.last.json) == ("/v1/adapters/unload", {"name": "math"})


def test_what_the_models_own_name_serves_is_switched(server: RecordingServer, run: Any) -> None:
    server.answers["POST /model/switch-lora"] = {"serves": {"math": 0.9, "base": 0.1}}
    found = run("adapters", "switch", "math@2")
    assert found.out == "the model's own name serves math (0.9), base (0.1)\n"
    assert server.last.json == {"version": "math@2", "name": None}
    run("adapters", "switch", "math=0.9", "base=0.1")
    assert server.last.json == {"split": {"math": 0.9, "base": 0.1}, "name": None}
    run("adapters", "switch", "math=0.5", "base=0.5", "--auto", "--confidence", "0.9", "--min-rewards", "7")
    assert server.last.json["auto"] is True
    assert (server.last.json["confidence"], server.last.json["min_rewards"]) == (0.9, 7)
    for words, said in ((("math", "base"), "'math' has no share"), (("math=much",), "'math=much' has no share")):
        found = run("adapters", "switch", *words)
        assert (found.code, found.out) == (2, "")
        assert said in found.err
    assert "--version is a number, not 'new'" in run("adapters", "load", "a", "b", "--version", "new").err


def test_what_a_server_refuses_is_one_line(server: RecordingServer, run: Any) -> None:
    server.answers["POST /v1/adapters/unload"] = 404, {"error": {"message": "there is no adapter 'math'"}}
    found = run("adapters", "unload", "math")
    assert (found.code, found.err) == (1, "error: there is no adapter 'math'\n")


# parallm models


def model(**fields: Any) -> dict[str, Any]:
    told = {"id": "chat", "kind": "chat", "status": "ready", "progress": 1.0, "pinned": False, "parent": None}
    return told | {"root": "folder/chat", "max_model_len": 4096, **fields}


def test_models_are_listed_with_their_status(server: RecordingServer, run: Any) -> None:
    server.answers["GET /v1/models"] = {
        "data": [
            model(pinned=True),
            model(id="late", status="loading", progress=0.25),
            model(id="gone", status="failed", error="no such folder", max_model_len=None),
            model(id="math", parent="chat"),
        ]
    }
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run("models").out.splitlines() if "│" in line]
    assert lines == [
        ["chat", "chat", "ready, pinned", "4096", "folder/chat"],
        ["late", "chat", "loading 25%", "4096", "folder/chat"],
        ["gone", "chat", "failed: no such folder", "", "folder/chat"],
        ["math", "chat", "ready", "4096", "adapter of chat"],
    ]


def test_models_come_and_go(server: RecordingServer, run: Any) -> None:
    server.answers["POST /v1/models/load"] = {"model": "chat", "status": "ready", "pinned": False}
    server.answers["POST /v1/models/unload"] = {"model": "chat", "status": "unloading", "pinned": False}
    assert run("models", "load", "chat").out == "chat is ready\n"
    assert server.last.json == {"model": "chat"}
    run("models", "load", "chat", "some/folder")
    assert server.last.json == {"model": "chat", "path": "some/folder"}
    assert run("models", "unload", "chat").out == "chat is unloading\n"
    assert (server.last.path, server.last.json) == ("/v1/models/unload", {"model": "chat"})
    run("models", "unpin", "chat")
    assert server.last.json == {"model": "chat", "pin": False}
    server.answers["POST /v1/models/load"] = {"model": "chat", "status": "ready", "pinned": True}
    assert run("models", "pin", "chat").out == "chat is ready, pinned\n"
    assert server.last.json == {"model": "chat", "pin": True}


def test_servers_are_asked_with_the_key_and_their_words_are_told(
    server: RecordingServer, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["GET /v1/models"] = 401, {"error": {"message": "the key is wrong"}}
    found = run("models", url=f"{server.url}/v1/", key=None)
    assert (found.code, found.err) == (1, f"error: {server.url}/v1/models: the key is wrong\n")
    assert "authorization" not in server.last.headers
    monkeypatch.setenv("PARALLM_API_KEY", "from-the-environment")
    server.answers["GET /v1/models"] = 502, "bad gateway"
    found = run("models", key=None)
    assert found.err == f"error: {server.url}/v1/models: status 502: bad gateway\n"
    assert server.last.headers["authorization"] == "Bearer from-the-environment"
    found = run("models", url="http://127.0.0.1:9")
    assert found.code == 1
    assert found.err.startswith("error: no server answers at http://127.0.0.1:9 (")


# parallm top


def counters(**fields: Any) -> dict[str, Any]:
    told = {"slots_total": 32, "running": 3, "queue_depth_last": 1, "generated_tokens": 100, "prompt_tokens": 50}
    told |= {"cached_tokens": 10, "prefix": {"blocks": 1234}, "memory": {"limit": 4 << 30}, "active_memory": 1 << 30}
    told |= {"kv_bytes": 1 << 29, "kv_bytes_limit": 1 << 31, "ssd": {"files": 12, "bytes": 3 << 29}}
    told |= {"background": {"seconds": 1.0}, "predictions": {"seconds": 0.0}, "requests_rejected": 5}
    return (
        told
        | {"requests_finished": {"stop": 1000, "length": 2}, "models": {"words": {"running": 4, "queue_depth_last": 2}}}
        | fields
    )


def test_top_tells_what_happened_between_two_looks(server: RecordingServer, run: Any) -> None:
    from rich.console import Console

    from mlx_parallm.cli.top import view

    later = counters(generated_tokens=300, prompt_tokens=80, cached_tokens=100)
    later |= {"background": {"seconds": 1.5}, "predictions": {"seconds": 0.2}}
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(view("http://here", counters(), later, 2.0))
    text = " ".join(console.export_text().split())
    for said in (
        "http://here",
        "3 running of 32 at most, 1 waiting",
        "100 tokens/s written, 15 tokens/s read",
        "75% from the prefix cache; 1,234 blocks in memory",
        "1.00 GiB of 4.00 GiB",
        "0.50 GiB of 2.00 GiB",
        "12 files, 1.50 GiB",
        "training 25%, predictions 10%",
        "stop 1,000, length 2; 5 rejected",
        "words │ 4 running, 2 waiting",
    ):
        assert said in text, text
    console.print(view("http://here", counters(), counters(ssd={}, requests_finished={}, models=None), 1.0))
    text = console.export_text()
    assert "SSD" not in text
    assert "none yet; 5 rejected" in text
    assert "0% from the prefix cache" in text
    server.answers["GET /debug/metrics"] = counters()
    assert "3 running of 32" in run("top", "--once", "--interval", "0.01").out
    assert len(server.sent) == 2
    assert "--interval must be a positive number" in run("top", "--interval", "0").err


# parallm connect


@pytest.mark.parametrize(
    "client", ["openai", "anthropic", "ollama", "langchain", "claude-code", "codex", "continue", "zed"]
)
def test_connect_prints_where_which_model_and_the_key(server: RecordingServer, run: Any, client: str) -> None:
    server.answers["GET /v1/models"] = {"data": [model(id="words", kind="embedding"), model(id="talk")]}
    found = run("connect", client)
    assert found.code == 0
    assert found.out.startswith("# ")
    assert "talk" in found.out
    assert server.url in found.out
    assert (f"{server.url}/v1" in found.out) == (client in ("openai", "langchain", "codex", "continue", "zed"))
    assert (KEY in found.out) == (client not in ("codex", "zed"))
    if client == "claude-code":
        exports = dict(line.removeprefix("export ").split("=", 1) for line in found.out.splitlines()[1:] if line)
        assert {name: json.loads(value) for name, value in exports.items()} == {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": "talk",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "talk",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    if client in ("continue", "zed"):
        settings = json.loads(found.out.partition("\n")[2])
        if client == "continue":
            assert settings == {
                "name": "MLX ParaLLM",
                "provider": "openai",
                "model": "talk",
                "apiBase": f"{server.url}/v1",
                "apiKey": KEY,
            }
        else:
            (provider,) = settings["language_models"]["openai_compatible"].values()
            assert provider["api_url"] == f"{server.url}/v1"
            assert provider["available_models"] == [{"name": "talk", "display_name": "talk", "max_tokens": 8192}]
    if client == "codex":
        import tomllib

        read = tomllib.loads(found.out.partition("\n")[2])
        assert (read["model"], read["model_provider"]) == ("talk", "parallm")
        assert read["model_providers"]["parallm"] == {
            "name": "MLX ParaLLM",
            "base_url": f"{server.url}/v1",
            "env_key": "OPENAI_API_KEY",
            "wire_api": "responses",
        }
    assert "Bearer none" in run("connect", "ollama", key=None).out


def test_connect_names_models_that_are_there(server: RecordingServer, run: Any) -> None:
    server.answers["GET /v1/models"] = {"data": [model(id="words", kind="embedding"), model(id="eyes", kind="vision")]}
    found = run("connect")
    assert found.out.count("\n# ") == 7
    assert "eyes" in found.out
    assert "words" in run("connect", "openai", "--model", "words").out
    assert "serves no model 'nobody'; there is words, eyes" in run("connect", "--model", "nobody").err
    server.answers["GET /v1/models"] = {"data": [model(id="words", kind="embedding")]}
    assert "serves no model that chats" in run("connect").err


@pytest.mark.parametrize("agent", ["claude-code", "codex", "aider", "ollama"])
def test_launch_starts_the_agent_for_the_server(
    server: RecordingServer, run: Any, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["GET /v1/models"] = {"data": [model(id="talk")]}
    program = tmp_path / {"claude-code": "claude"}.get(agent, agent)
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nenv > {tmp_path}/env\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    found = run("launch", agent)
    assert f"is not on the PATH: install {agent} first" in found.err
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code = main(["launch", agent, "--url", server.url, "--api-key", KEY, "--", "--more", "words"])
    assert code == 7
    words = (tmp_path / "words").read_text().split()
    variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line)
    assert words[-2:] == ["--more", "words"]
    if agent == "claude-code":
        assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_MODEL"]) == (server.url, "talk")
        assert words == ["--more", "words"]
    elif agent == "ollama":
        assert variables["OLLAMA_HOST"] == server.url
        assert words == ["--more", "words"]
    else:
        assert variables["OPENAI_BASE_URL"] == f"{server.url}/v1"
        assert (variables["OPENAI_API_KEY"], variables["OPENAI_MODEL"]) == (KEY, "talk")
        if agent == "aider":
            assert words[:2] == ["--model", "openai/talk"]
        else:
            options = (tmp_path / "words").read_text().splitlines()[1:-2:2]
            assert 'model="talk"' in options
            assert f'model_providers.parallm.base_url="{server.url}/v1"' in options
            assert 'model_providers.parallm.wire_api="responses"' in options
            assert 'model_providers.parallm.env_key="OPENAI_API_KEY"' in options
            assert 'model_provider="parallm"' in options


# parallm chat


def stream(*texts: str, tokens: int = 5) -> str:
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks += [{"choices": [], "usage": {"completion_tokens": tokens}}]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


CHAT = "POST /v1/chat/completions"


def test_chat_sends_the_conversation_and_what_was_asked_for(server: RecordingServer, run: Any, tmp_path: Path) -> None:
    server.answers |= {"GET /v1/models": {"data": []}, CHAT: stream("Good", " day.")}
    file = tmp_path / "talk.json"
    script = f"hello\n\nagain\n/save {file}\n/system Be brief.\nmore\n/reset\n/system\nlast\n"
    script += "/nobody\n/save\n/help\n/exit\nnever\n"
    options = ["--system", "Be kind.", "--temperature", "0.25", "--top-p", "0.5", "--top-k", "7", "--min-p", "0.125"]
    options += ["--repetition-penalty", "1.5", "--max-tokens", "9", "--seed", "3", "--model", "math"]
    found = run("chat", *options, stdin=script)
    assert found.code == 0
    assert found.out == "Good day.\n" * 4
    bodies = [one.json for one in server.sent if one.method == "POST"]
    said, answered = [{"role": "user", "content": "hello"}], {"role": "assistant", "content": "Good day."}
    system = {"role": "system", "content": "Be kind."}
    assert bodies[0]["messages"] == [system, *said]
    assert bodies[1]["messages"] == [system, *said, answered, {"role": "user", "content": "again"}]
    assert bodies[2]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert len(bodies[2]["messages"]) == 6
    assert bodies[3]["messages"] == [{"role": "user", "content": "last"}]
    assert json.loads(file.read_text()) == [*bodies[1]["messages"], answered]
    first = {name: value for name, value in bodies[0].items() if name != "messages"}
    assert first == {
        "model": "math",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "seed": 3,
    }
    assert server.last.headers["authorization"] == f"Bearer {KEY}"
    for words in (f"math at {server.url}", "5 tokens", f"saved to {file}", "system prompt set", "no system prompt"):
        assert words in found.err
    for words in ("a new conversation", "no command /nobody; /help lists them", "/save needs a file name"):
        assert words in found.err
    assert "can't write" in run("chat", stdin=f"/save {tmp_path}\n").err


def test_chat_leaves_out_what_was_not_asked_for(server: RecordingServer, run: Any) -> None:
    server.answers |= {"GET /v1/models": {"data": []}, CHAT: stream("Yes.")}
    found = run("chat", "-p", "hello")
    assert (found.code, found.out) == (0, "Yes.\n")
    assert server.last.json.keys() == {"model", "messages", "stream", "stream_options", "temperature"}
    assert server.last.json["temperature"] == 0.7
    run("chat", "-p", "-", stdin="from a file\nof two lines")
    assert server.last.json["messages"] == [{"role": "user", "content": "from a file\nof two lines"}]


def test_messages_of_several_lines(server: RecordingServer, run: Any) -> None:
    server.answers |= {"GET /v1/models": {"data": []}, CHAT: stream("Yes.")}
    run("chat", stdin='one\\\ntwo\n"""three\nfour"""\n"""\nfive\nsix')
    said = [one.json["messages"][-1]["content"] for one in server.sent if one.method == "POST"]
    assert said == ["one\ntwo", "three\nfour", "five\nsix"]


def test_an_answer_that_failed_leaves_no_trace(server: RecordingServer, run: Any) -> None:
    server.answers |= {"GET /v1/models": {"data": []}, CHAT: (400, {"error": {"message": "too long"}})}
    found = run("chat", stdin="hello\nhello again\n")
    assert (found.code, found.out) == (1, "")
    assert found.err.count("error: too long") == 2
    assert server.last.json["messages"] == [{"role": "user", "content": "hello again"}]
    assert run("chat", "-p", "hello").code == 1
    for told, words in (
        ('data: {"error": {"message": "the engine died"}}\n\n', "error: the engine died"),
        ('data: {"error": "as Ollama says it"}\n\n', "error: as Ollama says it"),
    ):
        server.answers[CHAT] = told
        assert words in run("chat", "-p", "hello").err
    server.answers[CHAT] = 503, "not JSON at all"
    assert "error: not JSON at all" in run("chat", "-p", "hello").err
    server.answers[CHAT] = stream()
    found = run("chat", stdin="hello\nagain\n")
    assert found.err.count("an empty response") == 2
    assert len(server.last.json["messages"]) == 1
    thinking = {"choices": [{"delta": {"reasoning_content": "Hm."}}, {"delta": None}]}
    server.answers[CHAT] = f"data: {json.dumps(thinking)}\n\ndata: [DONE]\n\n"
    found = run("chat", "-p", "hello")
    assert (found.out, "1 tokens" in found.err) == ("Hm.\n", True)


def test_chat_needs_somebody_who_answers(server: RecordingServer, run: Any) -> None:
    found = run("chat", "-p", "hi", url="http://127.0.0.1:9")
    assert (found.code, found.err) == (1, "error: no server answers at http://127.0.0.1:9\n")
    server.answers["GET /v1/models"] = 503, {"error": {"message": "starting"}}
    assert "no server answers" in run("chat", "-p", "hi").err


# parallm completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("adapters", "recommend", "memory-limit", "parallm"):
        assert word in script
