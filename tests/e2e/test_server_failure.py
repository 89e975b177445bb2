"""When the engine thread dies, everyone learns of it: open requests at once, then /health, then whoever asks next."""

import json
import sys
from pathlib import Path

import httpx

from tests.support.servers import ServerProcess, free_port, running

# A real server whose decode step raises as soon as a certain file is there: as often as the file says, or always.
SABOTAGE = """
import pathlib, sys
from mlx_parallm.cli.main import main
from mlx_parallm.engine.compute.runner import Runner

decode, trigger = Runner.decode, pathlib.Path(sys.argv.pop(1))

def broken(self, rows, drafted=None):
    if trigger.exists():
        left = trigger.read_text()
        if left == "1":
            trigger.unlink()
        raise RuntimeError("sabotage")
    return decode(self, rows, drafted)

Runner.decode = broken
sys.exit(main(sys.argv[1:]))
"""
BODY = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True}


def sabotaged(folder: Path, trigger: Path, *flags: str) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-c", SABOTAGE, str(trigger)]
    command += ["serve", "--port", str(port), "--model-path", str(folder), *flags]
    return ServerProcess(command, port, "default")


def test_a_dead_engine_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    flags = ["--no-exit-on-engine-failure"]
    with (
        running(sabotaged(tiny_folder, trigger, *flags)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        assert client.post("/v1/completions", json=BODY).status_code == 200
        trigger.touch()
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        error = json.loads(events[-2] if response.status_code == 200 else events[-1])["error"]
        assert error["type"] == "service_unavailable"
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "unhealthy"
        assert "sabotage" in health.json()["reason"]
        late = client.post("/v1/completions", json=BODY)
        assert (late.status_code, late.json()["error"]["type"]) == (503, "service_unavailable")
        assert "Traceback" not in late.text
        assert client.get("/v1/models").status_code == 200
        assert server.process.poll() is None


def test_one_fault_costs_nobody_anything_and_three_end_the_process(tiny_folder: Path, tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    with running(sabotaged(tiny_folder, trigger)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        expected = client.post("/v1/completions", json=BODY | {"temperature": 0}).json()["choices"]
        trigger.write_text("1")
        assert client.post("/v1/completions", json=BODY | {"temperature": 0}).json()["choices"] == expected
        assert client.get("/debug/metrics").json()["faults"] == 1
        assert client.get("/health").status_code == 200
        trigger.write_text("")
        assert client.post("/v1/completions", json=BODY).status_code == 503
        assert server.process.wait(20) == 1
