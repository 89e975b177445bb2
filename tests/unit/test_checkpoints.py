"""Checkpoints are there whole or not at all, whatever ends the writer."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mlx_parallm.errors import InvalidRequestError
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.lora.adapter_files import read_folder
from mlx_parallm.training.rl.totals import Totals
from mlx_parallm.training.storage.checkpoints import ARRAYS, Checkpoints, adapter_files, check_new_name, peft_files
from mlx_parallm.training.storage.journal import Journal
from mlx_parallm.training.storage.session_store import SessionState

ARRAY = {"parameters.a": np.arange(12, dtype=np.float32).reshape(3, 4)}


def save(checkpoints: Checkpoints, updates: int, name: str | None = None) -> None:
    checkpoints.save(
        name or f"step-{updates:08d}", {"x": b"1"}, ARRAY, {"updates": updates, "extra": {"step": updates}}
    )


def test_the_newest_are_kept_and_those_with_a_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest() is None
    save(checkpoints, 1, "named")
    for number in range(2, 6):
        save(checkpoints, number)
    assert sorted(checkpoints.names()) == ["named", "step-00000004", "step-00000005"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.state["extra"] == {"step": 5}
    assert np.array_equal(latest.arrays["parameters.a"], ARRAY["parameters.a"])
    save(checkpoints, 9, "named")
    assert checkpoints.load("named").state["updates"] == 9


@pytest.mark.parametrize("state", ["[]", '{"saved_at": 1e12, "files": []}', '{"saved_at": 1e12, "files": {}}'])
def test_a_state_of_another_shape_is_passed_over(tmp_path: Path, state: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 4, "good")
    save(checkpoints, 5)
    (tmp_path / "step-00000005" / "state.json").write_text(state)
    found = checkpoints.latest(SessionState.of_json)
    assert found is not None
    assert found.path.name == "good"


def test_names_that_the_server_uses_are_not_given_away(tmp_path: Path) -> None:
    for name in ("latest", "best-performance", "step-5", "journal-00000900.jsonl", "answers.jsonl", "../x", ""):
        with pytest.raises(InvalidRequestError):
            check_new_name(name)
    check_new_name("mine-1.0")
    (tmp_path / "journal-00000900.jsonl").mkdir()
    journal = Journal(tmp_path)
    journal.append({"version": 1})
    assert (journal.numbers(), list(journal.read())) == ([0], [{"version": 1}])
    journal.close()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Calls that bring something to the disk or give it its name, with what they are about."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noted_rename(source: object, target: object) -> None:
        calls.append(("rename", f"{source} {target}"))
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    return calls


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files are asked of Linux")
@pytest.mark.parametrize("there", [False, True], ids=["new", "in the place of another"])
def test_all_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    if there:
        save(checkpoints, 1, "named")
    calls = recorded(monkeypatch)
    save(checkpoints, 2, "named")
    named = next(place for place, (kind, what) in enumerate(calls) if kind == "rename" and what.endswith("/named"))
    partial = calls[named][1].split(" ")[0]
    before = [what for kind, what in calls[:named] if kind == "fsync"]
    written = {f"{partial}/{file.name}" for file in (tmp_path / "named").iterdir()}
    assert {"x", ARRAYS, "state.json"} == {file.name for file in (tmp_path / "named").iterdir()}
    assert written <= set(before), "every file"
    assert before[-1] == partial, "then the folder that names them"
    assert calls[named + 1] == ("fsync", str(tmp_path)), "and the folder that names it, after the rename"
    if there:
        assert calls[named - 1][0] == "rename", "the old one is moved aside once the new one is on the disk"


def test_the_last_written_counts_whatever_its_number(tmp_path: Path) -> None:
    """After a rollback, or a run that did not go on from the last, numbers begin anew."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (100, 200, 20, 21):
        save(checkpoints, number)
    assert sorted(checkpoints.names()) == ["step-00000020", "step-00000021"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.state["updates"] == 21


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for number in (1, 2, 3):
        save(checkpoints, number)
    data = bytearray((tmp_path / "step-00000003" / ARRAYS).read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000003" / ARRAYS).write_bytes(data)
    (tmp_path / "step-00000002" / "state.json").write_text("{")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.state["updates"] == 1
    with pytest.raises(InvalidRequestError, match="damaged"):
        checkpoints.load("step-00000003")


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "x" * 101])
def test_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        save(Checkpoints(tmp_path, keep=1), 1, name or "/")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    save(checkpoints, 1, "best")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        save(checkpoints, 2, "best")
    monkeypatch.undo()
    assert checkpoints.load("best").state["updates"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_what_a_kill_between_two_renames_leaves_is_put_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    save(checkpoints, 1, "best")
    os.rename(tmp_path / "best", tmp_path / ".old-best")
    (tmp_path / ".partial-best-1").mkdir()
    checkpoints.tidy()
    assert checkpoints.load("best").state["updates"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


WRITER = """
import sys, numpy as np
from pathlib import Path
from mlx_parallm.training.storage.checkpoints import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), 3)
checkpoints.tidy()
latest = checkpoints.latest()
number = 0 if latest is None else latest.state["updates"]
print("ready", number, flush=True)
while True:
    number += 1
    arrays = {"parameters.a": np.full((200, 1000), number, np.float32)}
    for name in (f"step-{number:08d}", "best-performance"):
        checkpoints.save(name, {"x": b"0" * 100_000}, arrays, {"updates": number})
"""


@pytest.mark.long
def test_kills_while_it_writes(tmp_path: Path) -> None:
    chance, last = random.Random(0), 0
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        found = int(writer.stdout.readline().split()[1])
        assert found >= last, "a checkpoint was lost"
        time.sleep(0.05 + 0.3 * chance.random())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        checkpoints = Checkpoints(tmp_path, 3)
        checkpoints.tidy()
        latest = checkpoints.latest()
        last = 0 if latest is None else latest.state["updates"]
        for name in checkpoints.names():
            kept = checkpoints.load(name)
            assert (kept.arrays["parameters.a"] == kept.state["updates"]).all()
    assert last > 6


def test_adapters_in_both_formats(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    part = Part(chance.standard_normal((4, 64)).astype(np.float32), chance.standard_normal((32, 4)).astype(np.float32))
    adapter = Adapter({"model.layers.1.self_attn.q_proj": part})
    for name, files in (
        ("mlx", adapter_files(adapter, 2.0, 4, "model")),
        ("peft", peft_files(adapter, 4, "model")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        read, config = read_folder(folder, 1 << 20)
        found = read.parts["model.layers.1.self_attn.q_proj"]
        assert np.allclose(found.a, part.a)
        assert np.allclose(found.b, part.b)
        json.dumps(config)


def test_nothing_of_an_entry_stays_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, write = Journal(tmp_path), os.write
    journal.append({"version": 1})

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append({"version": 2, "text": "longer one"})
    assert (tmp_path / "journal-00000000.jsonl").read_bytes() == b'{"version":1}\n'
    journal.append({"version": 3})
    assert [entry["version"] for entry in journal.read()] == [1, 3]
    journal.close()


def test_totals_go_on_from_a_checkpoint_of_any_release() -> None:
    totals = Totals(updates=3, used=12, kl=0.5, last_reason="too far", stands=5)
    totals.history.append({"updates": 3})
    again = Totals()
    again.restore({**totals.state(), "something_of_another_release": 1}, 5)
    assert again == totals
