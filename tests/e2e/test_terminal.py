"""The commands for people at a terminal, against a real server: models, top, connect, launch, completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.cli.recommend import prospects
from tests.support import forked
from tests.support.servers import ServerProcess

GIB = 1 << 30


def parallm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_parallm", *arguments]
    return forked.run(command, 60, os.environ | {"COLUMNS": "200"} | environment)


def test_models(tiny_server: ServerProcess) -> None:
    listed = parallm("models", "--url", tiny_server.url)
    assert listed.returncode == 0, listed.stderr
    assert "tiny-llama" in listed.stdout
    assert "ready" in listed.stdout
    assert parallm("models", "--url", tiny_server.url, "pin", "tiny-llama").stdout == "tiny-llama is ready, pinned\n"
    assert parallm("models", "--url", tiny_server.url, "unpin", "tiny-llama").stdout == "tiny-llama is ready\n"
    wrong = parallm("models", "--url", tiny_server.url, "load", "nobody")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")
    assert "nobody" in wrong.stderr


def test_no_server_is_one_line() -> None:
    for command in (["models"], ["top", "--once"], ["connect"], ["launch", "codex"]):
        ended = parallm(*command, "--url", "http://127.0.0.1:1")
        assert ended.returncode == 1
        (line,) = ended.stderr.splitlines()
        assert "no server answers at http://127.0.0.1:1" in line
        assert "--url" in line


def test_top_looks_once(tiny_server: ServerProcess) -> None:
    shown = parallm("top", "--url", tiny_server.url, "--once", "--interval", "0.2")
    assert shown.returncode == 0, shown.stderr
    for word in ("running of", "tokens/s written", "from the prefix cache", "GiB"):
        assert word in shown.stdout
    assert parallm("top", "--interval", "nan").returncode == 2


def test_what_connect_prints_for_openai_runs(tiny_server: ServerProcess) -> None:
    shown = parallm("connect", "openai", "--url", tiny_server.url).stdout
    program = shown.replace('content": "Hello"}]', 'content": "Hello"}], max_tokens=2')
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    everything = parallm("connect", "--url", tiny_server.url, PARALLM_API_KEY="its-key").stdout
    for word in ("ANTHROPIC_BASE_URL", "wire_api", "langchain", "its-key", "tiny-llama", "from ollama"):
        assert word in everything
    assert "serves no model" in parallm("connect", "--url", tiny_server.url, "--model", "nobody").stderr


def test_launch_starts_an_agent_with_its_environment(tiny_server: ServerProcess, tmp_path: Path) -> None:
    agent = tmp_path / "claude"
    agent.write_text('#!/bin/sh\necho "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $*" > "$OUT"\nexit 7\n')
    agent.chmod(0o755)
    out = tmp_path / "out"
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out)}
    ended = parallm("launch", "claude-code", "--url", tiny_server.url, "--", "--resume", "x", **found)
    assert ended.returncode == 7, ended.stderr
    assert out.read_text() == f"{tiny_server.url} tiny-llama --resume x\n"
    missing = parallm("launch", "codex", "--url", tiny_server.url, PATH=str(tmp_path))
    assert missing.returncode == 2
    assert "codex is not on the PATH" in missing.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str) -> None:
    script = parallm("completion", shell)
    assert script.returncode == 0, script.stderr
    assert "--max-batch-size" in script.stdout
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script.stdout, text=True).returncode == 0


def test_recommendations_fit() -> None:
    shown = parallm("recommend", "--json", "--memory-limit", "12GiB")
    report = json.loads(shown.stdout)
    assert report["limit"] == 12 * GIB
    assert 1e8 < report["bandwidth"] < 1e13
    for one in report["models"]:
        assert one["weights"] + one["answers"] * one["row"] <= report["limit"]
        assert one["speed"] > 0
    small, large = prospects(8 * GIB, 1e11, 4.5), prospects(128 * GIB, 1e11, 4.5)
    assert {one.name for one in small} < {one.name for one in large}
    assert prospects(GIB // 4, 1e11, 4.5) == []
