"""`--check-logs` finds what it looks for: a search that finds nothing must be able to find something."""

import argparse
import logging
import plistlib
from pathlib import Path

import httpx
import pytest

from mlx_parallm.config.http import HttpConfig
from mlx_parallm.config.serve_config import add_serve_flags
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.http import logs
from tests.support.log_check import LogCheck

PROMPT = 'the password is "swordfish"'


@pytest.fixture
def check(tmp_path: Path) -> LogCheck:
    found = LogCheck(tmp_path)
    chat = {"model": "default", "messages": [{"role": "user", "content": PROMPT}]}
    headers = {"Authorization": "Bearer sesame-open"}
    found.note(httpx.Request("POST", "http://server/v1/chat/completions", json=chat, headers=headers))
    load = {"name": "mine", "path": "/home/someone/adapter"}
    found.note(httpx.Request("POST", "http://server/v1/adapters/load", json=load, headers={"x-api-key": "short"}))
    found.note(httpx.Request("GET", "http://server/v1/models", params={"prompt": "asked by query"}))
    found.note(httpx.Request("POST", "http://server/upload", content=b"\x00no json"))
    return found


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("401 with key sesame-open", "key"),
        (f"prompt: {PROMPT}", "prompt"),
        ('{"prompt": "the password is \\"swordfish\\""}', "prompt"),
        ("GET /v1/models?prompt=asked by query", "prompt"),
        ("no folder /home/someone/adapter", "path"),
    ],
)
def test_what_clients_sent_is_found(check: LogCheck, line: str, kind: str) -> None:
    check.keep(["serve"], f"started\n{line}\n")
    [found] = check.findings()
    assert f"has the {kind}" in found


def test_the_rest_is_no_finding(check: LogCheck) -> None:
    check.keep(["serve", "--lora-path", "/home/someone/adapter"], "loading /home/someone/adapter\n")
    check.keep(["serve"], "POST /v1/chat/completions 200, model default, short, sesame-opening\n")
    assert list(check.findings()) == []


def test_a_key_of_the_command_line_is_a_secret_too(check: LogCheck) -> None:
    check.keep(["serve", "--api-key", "sesame-open"], "flags: --api-key sesame-open\n")
    assert len(list(check.findings())) == 1


def test_the_audit_log_is_searched(check: LogCheck, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    audit.write_text('{"path": "/home/someone/adapter"}\n')
    check.keep(["serve", "--audit-log", str(audit)], "nothing\n")
    assert [found.split(" ")[0] for found in check.findings()] == ["0001-audit.log"]


@pytest.mark.parametrize(("level", "others"), [("DEBUG", "WARNING"), ("INFO", "WARNING"), ("ERROR", "ERROR")])
def test_libraries_say_what_is_wrong_and_no_more(level: str, others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    libraries = [logging.getLogger(name) for name in ("httpx", "asyncio", "filelock", "urllib3", "uvicorn.error")]
    before = [(logger, logger.level) for logger in (root, *libraries)]
    try:
        logs.set_up(HttpConfig(log_level=level))
        assert logging.getLevelName(root.level) == level
        assert {logging.getLevelName(logger.level) for logger in libraries} == {others}
    finally:
        for logger, was in before:
            logger.setLevel(was)


def test_a_log_file_is_rotated_and_errors_name_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logs, "FILE_BYTES", 2000)
    file = tmp_path / "logs" / "server.log"
    before = root.level
    try:
        logs.set_up(HttpConfig(log_file=str(file)), helper=True)
        logging.getLogger("test").warning("of a helper")
        assert not file.exists(), "the process that it helps writes the file"
        logs.set_up(HttpConfig(log_file=str(file)))
        for number in range(200):
            logging.getLogger("test").warning("line %d", number)
        assert "line 199" in file.read_text()
        names = [path.name for path in file.parent.iterdir()]
        assert sorted(names) == ["server.log", *(f"server.log.{number}" for number in range(1, 5))]
        assert all(path.stat().st_size <= 2000 for path in file.parent.iterdir())
        (tmp_path / "taken").write_text("")
        with pytest.raises(ConfigError, match=r"--log-file .*taken/server\.log can't be written"):
            logs.set_up(HttpConfig(log_file=str(tmp_path / "taken" / "server.log")))
        logging.getLogger("test").warning("goes on")
        assert "goes on" in file.read_text()
    finally:
        for handler in root.handlers:
            handler.close()
        root.setLevel(before)


def test_the_launch_agent_starts_a_server_with_a_log_that_is_rotated() -> None:
    plist = plistlib.loads((Path(__file__).parents[2] / "packaging" / "mlx-parallm.plist").read_bytes())
    program, *flags = plist["ProgramArguments"]
    assert program.endswith("mlx_parallm_serve")
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    assert parser.parse_args(flags).log_file == "~/Library/Logs/mlx-parallm.log"
