"""`parallm doctor` on this machine: every line, as text and as JSON, and what it says of what is wrong."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_parallm.devices.device import DEVICES
from mlx_parallm.doctor import machine
from mlx_parallm.doctor.findings import Finding, look
from tests.support import forked

MACHINE = ["platform", "chip", "memory", "versions", "BLAS", "kernels", "faults", "open files", "cache", "port", "disk"]
MODEL = ["model", "parity", "decode", "prefill", "sampler", "adapters", "joins"]


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_parallm", "doctor", *flags]
    return forked.run(command, 300)


def test_a_report_of_machine_and_model(tiny_folder: Path, tmp_path: Path) -> None:
    ended = doctor("--json", "--model-path", str(tiny_folder), "--ssd-cache-dir", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert list(found) == MACHINE + MODEL
    assert (report["ok"], report["wrong"]) == (True, [])
    assert found["parity"]["numbers"]["same"] == found["parity"]["numbers"]["of"] == 4
    assert found["parity"]["numbers"]["largest_gap"] < 1e-4
    assert set(found["decode"]["numbers"]) == {"1", "4", "8", "16", "32"}
    assert all(rate > 0 for rate in found["decode"]["numbers"].values())
    assert found["disk"]["numbers"]["read"] > 0
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"


def test_lines_say_what_helps(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = doctor("--no-model", "--port", str(port), "--ssd-cache-dir", str(tmp_path))
    assert ended.returncode == 0
    assert f"slow    port        {port} is taken by another server" in ended.stdout
    assert f"-> stop it, or serve with --port {port + 1}" in ended.stdout
    assert "slow: " in ended.stdout.splitlines()[-1]
    assert "parity" not in ended.stdout


def test_a_model_that_does_not_load_is_a_line(tmp_path: Path) -> None:
    ended = doctor("--model-path", "/no/such/model", "--ssd-cache-dir", str(tmp_path))
    assert ended.returncode == 1
    assert "wrong   model       there is no folder /no/such/model" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> Finding:
        raise RuntimeError("out of luck")

    finding = look("luck", broken)
    assert (finding.verdict, finding.found) == ("wrong", "RuntimeError: out of luck")


def test_every_check_that_breaks_has_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*arguments: object) -> Finding:
        raise RuntimeError("out of luck")

    for name in MACHINE:
        monkeypatch.setattr(machine, "_" + name.lower().replace(" ", "_"), broken)
    found = list(machine.examine(1, tmp_path))
    assert [(finding.name, finding.verdict) for finding in found] == [(name, "wrong") for name in MACHINE]


def test_faults_that_go_unnoticed_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._faults().verdict == "ok"
    monkeypatch.setattr(machine, "to_numpy", lambda array: None)
    monkeypatch.setattr(machine.mx, "async_eval", lambda array: None)
    assert machine._faults().verdict == "wrong"


def test_an_old_mlx_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "0.31.9")
    finding = machine._versions()
    assert (finding.verdict, "mlx>=0.32.4" in finding.remedy) == ("wrong", True)


def test_a_package_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("mlx", "no-such-package"))
    finding = machine._versions()
    assert finding.found.endswith(", no-such-package not installed")
    assert finding.verdict == "ok"


@pytest.mark.parametrize(
    ("kind", "system", "library", "found"),
    [
        ("cpu", "Linux", "/opt/mkl/lib/libmkl_rt.so.2", "libmkl_rt.so.2"),
        ("cpu", "Linux", None, "MLX's own, which is thirty times slower"),
        ("cpu", "Darwin", None, "not needed here"),
        ("cuda", "Linux", None, "not needed here"),
    ],
)
def test_the_library_that_multiplies_on_a_cpu_is_named(
    kind: str, system: str, library: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "this_device", lambda: DEVICES[kind])
    monkeypatch.setattr(machine, "loaded", lambda: library)
    monkeypatch.setattr(machine.platform, "system", lambda: system)
    assert machine._blas().found == found
