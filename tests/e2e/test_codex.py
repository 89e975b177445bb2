"""Codex CLI itself against our server, over three turns of a session, where npm can install it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.servers import ServerProcess, ours, running
from tests.tiny import save_tiny, tiny

CONFIG = """
model = "default"
model_provider = "parallm"

[model_providers.parallm]
name = "MLX ParaLLM"
base_url = "{url}/v1"
wire_api = "responses"
"""
ENDS_SOON = 4.0  # times the weights of the token that ends an answer: it is drawn within a few tokens


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("codex")
    command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--fetch-retries=0", "@openai/codex"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if done.returncode != 0:
        pytest.skip(f"npm can't install Codex CLI: {done.stderr.strip()[-200:]}")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models") / "tiny-agent"
    folder.mkdir()
    model = tiny("llama", max_position_embeddings=131_072)
    [end] = model.eos_token_ids
    weight = model.module.lm_head.weight
    model.module.lm_head.weight = weight * mx.where(mx.arange(weight.shape[0])[:, None] == end, ENDS_SOON, 1.0)
    save_tiny(model, folder)
    with running(ours(str(folder), ["--max-tokens", "2000"])) as server:
        yield server


@pytest.mark.slow
def test_a_session(codex: Path, server: ServerProcess) -> None:
    home, work = codex / "home", codex / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=server.url))

    def say(*words: str) -> dict[str, Any]:
        command = [str(codex / "node_modules/.bin/codex"), "exec", "--skip-git-repo-check", "--json", *words]
        env = os.environ | {"CODEX_HOME": str(home)}
        done = subprocess.run(
            command, cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400
        )
        last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert last["type"] == "turn.completed", done.stdout + done.stderr
        return last["usage"]  # of the whole session so far

    before = say("Say hello.")
    for words in ("And again.", "Once more."):
        usage = say("resume", "--last", words)
        asked, cached = (usage[name] - before[name] for name in ("input_tokens", "cached_input_tokens"))
        assert asked > 5_000
        assert cached >= 0.9 * asked
        before = usage
