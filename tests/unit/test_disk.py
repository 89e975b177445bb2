"""The SSD tier on real files: what comes back is what went in, or nothing."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from mlx_parallm.kv import disk as module
from mlx_parallm.kv import folders
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.folders import write_new_file
from mlx_parallm.kv.payload import Damaged, Payload, decode, encode

HASHES = [bytes([i]) * 16 for i in range(40)]


def payload(seed: int) -> Payload:
    draw = np.random.default_rng(seed)
    arrays = [draw.integers(0, 1 << 16, (3, 2, 4), np.uint16), draw.integers(0, 1 << 32, (5, 64), np.uint32)]
    return Payload(arrays, f"note {seed}")


@contextmanager
def tier(folder: Path, identity: str = "model", max_bytes: int = 1 << 30, **options: object) -> Iterator[DiskTier]:
    opened = DiskTier(folder, identity, max_bytes, 86400.0, **options)  # type: ignore[arg-type]
    opened.start()
    try:
        yield opened
    finally:
        opened.close(10)
        assert not opened._thread.is_alive()


def read(opened: DiskTier, *hashes: bytes) -> list[Payload]:
    found: list[Payload] = []
    done = threading.Event()

    def then(payloads: list[Payload]) -> None:
        found.extend(payloads)
        done.set()

    opened.read(hashes, then)
    assert done.wait(10)
    return found


def put(opened: DiskTier, *numbers: int) -> None:
    for number in numbers:
        opened.write(HASHES[number], payload(number))
    assert opened.settle(10)


def held_up(opened: DiskTier) -> threading.Event:
    """Keeps the thread of the tier from its writes until the event is set."""
    gate = threading.Event()
    opened.read([], lambda found: gate.wait(10) and None)
    return gate


def same(one: Payload, other: Payload) -> bool:
    pairs = zip(one.arrays, other.arrays, strict=True)
    return one.note == other.note and all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_what_was_written_is_there_after_a_restart_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "not/there/yet"
    (tmp_path / "open").mkdir(mode=0o755)
    with tier(tmp_path / "open") as opened:
        put(opened, 0)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755  # somebody else's: ours is within
    assert (tmp_path / "open/v2").stat().st_mode & 0o777 == 0o700
    with tier(folder) as opened:
        put(opened, 0, 1, 2)
        assert [same(found, payload(i)) for i, found in enumerate(read(opened, *HASHES[:3]))] == [True] * 3
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(folder))
    with tier(folder) as again:
        assert HASHES[1] in again
        assert HASHES[5] not in again
        assert len(read(again, HASHES[0], HASHES[1], HASHES[5], HASHES[2])) == 2  # up to the first that is missing
        assert again.metrics.files == 3
        assert again.metrics.bytes == sum(file.stat().st_size for file in files(folder))
    with tier(folder, identity="another model") as other:
        assert HASHES[1] not in other
        assert read(other, HASHES[1]) == []
        assert other.metrics.files == 3  # its limit is for all


def newer(data: bytes) -> bytes:
    return save(load(data), {"format": "mlx-parallm-kv/2", "name": HASHES[0].hex(), "note": "", "checksum": ""})


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "nearly whole": lambda data: data[:-1],
    "too long": lambda data: data + b"x",
    "empty": lambda data: b"",
    "a header that claims much": lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
    "foreign": lambda data: b"not a tensor in sight" * 100,
    "foreign tensors": lambda data: save({"x": np.zeros(3, np.uint8)}),
    "newer": newer,
    "nothing but zeros": lambda data: bytes(len(data)),
} | {f"bit {at} per mille": lambda data, at=at: flipped(data, at) for at in range(0, 1000, 37)}


def flipped(data: bytes, per_mille: int) -> bytes:
    changed = bytearray(data)
    changed[len(data) * per_mille // 1000] ^= 1 << (per_mille % 8)
    return bytes(changed)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_is_removed_and_counted(damage: str, tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, 0, 1)
    file = next(file for file in files(tmp_path) if file.stem == HASHES[0].hex())
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with tier(tmp_path) as opened:
        assert read(opened, HASHES[0]) == []
        assert (opened.metrics.damaged, opened.metrics.errors) == (1, 0)
        assert not file.exists()
        assert HASHES[0] not in opened
        assert same(read(opened, HASHES[1])[0], payload(1))
        put(opened, 0)
        assert same(read(opened, HASHES[0])[0], payload(0))


def test_a_file_under_anothers_name_is_damaged(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, 0, 1)
        one, other = files(tmp_path)
        shutil.copy(one, other)
        assert read(opened, HASHES[1]) == []
        assert opened.metrics.damaged == 1


def test_the_longest_unused_go_first_and_the_old_anyway(tmp_path: Path) -> None:
    now = [time.time()]

    def clock() -> float:
        return now[0]

    def put_now(opened: DiskTier, number: int) -> None:
        put(opened, number)
        os.utime(tmp_path / "v2" / opened._name(HASHES[number]), (now[0], now[0]))

    with tier(tmp_path, clock=clock) as opened:
        put_now(opened, 0)
    size = files(tmp_path)[0].stat().st_size
    with tier(tmp_path, clock=clock, max_bytes=3 * size + size // 2) as opened:
        for number in (0, 1, 2):
            now[0] += 100
            put_now(opened, number)
        now[0] += 100
        assert read(opened, HASHES[0])  # used again
        put_now(opened, 3)
        assert [hash_ in opened for hash_ in HASHES[:4]] == [True, False, True, True]
        assert opened.metrics.pruned == 1
    with tier(tmp_path, clock=clock, max_bytes=2 * size) as opened:  # use is remembered by the files
        assert [hash_ in opened for hash_ in HASHES[:4]] == [True, False, False, True]
    now[0] += 86400 - 50
    with tier(tmp_path, clock=clock) as opened:
        put_now(opened, 4)
    now[0] += 100
    with tier(tmp_path, clock=clock) as opened:
        assert [hash_ in opened for hash_ in HASHES[:5]] == [False, False, False, False, True]


def test_two_servers_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_SECONDS", 0.0)
    with tier(tmp_path) as one, tier(tmp_path) as other:
        put(one, 0, 1)
        put(other, 0, 2)
        for opened in (one, other):
            opened.read([HASHES[9]], lambda found: None)  # any work makes it look
            assert opened.settle(10)
            assert [hash_ in opened for hash_ in HASHES[:3]] == [True] * 3
            assert same(read(opened, HASHES[0])[0], payload(0))
        one.flush()
        assert one.settle(10)
        assert read(other, HASHES[1]) == []
        assert other.metrics.errors == other.metrics.damaged == 0
        put(other, 1)
        assert same(read(one, HASHES[1])[0], payload(1))


def test_the_folder_may_go_at_any_time(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with tier(folder) as opened:
        put(opened, 0)
        shutil.rmtree(folder)
        assert read(opened, HASHES[0]) == []
        assert HASHES[0] not in opened
        put(opened, 1)
        assert same(read(opened, HASHES[1])[0], payload(1))


def test_a_folder_that_can_not_be_made_costs_nothing_but_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with tier(tmp_path / "file") as opened:
        put(opened, 0, 1)
        assert read(opened, HASHES[0]) == []
        assert opened.metrics.errors >= 1
        assert opened.metrics.dropped >= 1  # after an error it rests
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_a_dead_process_left_is_swept_up(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, 0)
    fresh, stale = (files(tmp_path)[0].parent / name for name in (".a.1.0.tmp", ".b.1.0.tmp"))
    for file in (fresh, stale):
        file.write_bytes(b"half")
    os.utime(stale, (0, 0))
    with tier(tmp_path) as opened:
        assert opened.metrics.files == 1
    assert fresh.exists()
    assert not stale.exists()


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 3 * payload(0).nbytes)
    with tier(tmp_path) as opened:
        gate = held_up(opened)
        for number in range(6):
            opened.write(HASHES[number], payload(number))
        assert opened.metrics.dropped == 3
        assert HASHES[2] in opened  # what waits is known
        gate.set()
        assert opened.settle(10)
        assert opened.metrics.writes == 3
        huge = Payload([np.zeros((4, *array.shape), array.dtype) for array in payload(0).arrays])
        opened.write(HASHES[9], huge)  # alone, it may be larger
        assert opened.settle(10)
        assert HASHES[9] in opened


def test_what_was_written_waits_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 3 * payload(0).nbytes)
    with tier(tmp_path) as opened:
        for first in (0, 3, 6):  # as many as may wait, again and again
            gate = held_up(opened)
            for number in range(first, first + 3):
                opened.write(HASHES[number], payload(number))
            gate.set()
            assert opened.settle(10)
        assert (opened.metrics.writes, opened.metrics.dropped) == (9, 0)


def test_a_flush_takes_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 3 * payload(0).nbytes)
    with tier(tmp_path) as opened:
        put(opened, 0)
        gate = held_up(opened)
        for number in (1, 2, 3):
            opened.write(HASHES[number], payload(number))
        opened.flush()
        for number in (4, 5, 6):  # there is room again
            opened.write(HASHES[number], payload(number))
        gate.set()
        assert opened.settle(10)
        assert [number for number in range(7) if HASHES[number] in opened] == [4, 5, 6]
        assert [file.stem for file in files(tmp_path)] == [HASHES[number].hex() for number in (4, 5, 6)]
        assert opened.metrics.dropped == 0


def test_files_of_an_older_format_are_misses_and_go(tmp_path: Path) -> None:
    old = tmp_path / "v1" / "0123" / "ab"
    old.mkdir(parents=True)
    (old / "left.safetensors").write_bytes(b"what an earlier version wrote")
    (tmp_path / "v9").mkdir()
    (tmp_path / "notes").mkdir()
    with tier(tmp_path) as opened:
        put(opened, 0)
        assert same(read(opened, HASHES[0])[0], payload(0))
        assert opened.metrics.errors == opened.metrics.damaged == 0
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["notes", "v2", "v9"]


def test_many_files_come_back_in_order_and_up_to_the_first_that_is_gone(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, *range(40))
    with tier(tmp_path) as again:
        found = read(again, *HASHES)
        assert [same(one, payload(number)) for number, one in enumerate(found)] == [True] * 40
        (tmp_path / "v2" / again._name(HASHES[17])).unlink()
        assert len(read(again, *HASHES)) == 17
        assert again.metrics.misses == 1


def test_any_changed_byte_is_found() -> None:
    data = np.frombuffer(b"".join(encode(payload(3), "name")), np.uint8)
    assert same(decode(data, "name"), payload(3))
    for place in range(0, len(data), 7):
        changed = data.copy()
        changed[place] ^= 1
        try:
            found = decode(changed, "name")
        except Damaged:
            continue
        assert same(found, payload(3)), f"byte {place} was changed and nobody noticed"  # padding in the header
    for size in range(0, len(data), 11):
        with pytest.raises(Damaged):
            decode(data[:size], "name")
    with pytest.raises(Damaged, match="it holds"):
        decode(data, "another")


def test_files_are_safetensors_and_survive_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = encode(Payload([*payload(3).arrays, np.zeros((0, 2), np.uint8)], "a note"), "name")
    write_new_file(tmp_path / "whole", parts)
    whole = (tmp_path / "whole").read_bytes()
    assert whole == b"".join(parts)
    assert [(array.dtype, array.shape) for _, array in sorted(load(whole).items())] == [
        (array.dtype, array.shape) for array in decode(np.frombuffer(whole, np.uint8), "name").arrays
    ]
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda file, some: writev(file, [b"".join(some)[:99]]))
    monkeypatch.setattr(folders, "MAX_PART_BYTES", 64)
    write_new_file(tmp_path / "pieces", parts)
    assert (tmp_path / "pieces").read_bytes() == whole


def test_what_is_read_is_not_copied() -> None:
    data = np.frombuffer(b"".join(encode(payload(1), "name")), np.uint8)
    assert all(np.shares_memory(array, data) for array in decode(data, "name").arrays)


def test_how_fast_it_reads_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RATE_SAMPLE_BYTES", 1)
    with tier(tmp_path) as opened:
        put(opened, *range(40))
    with tier(tmp_path) as again:
        begun = time.perf_counter()
        size = sum(one.nbytes for one in read(again, *HASHES))
        least = size / (time.perf_counter() - begun)
        again.close(10)
        assert again.read_rate >= (module.FIRST_READ_RATE + least) / 2
