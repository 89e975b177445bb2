"""Parts of a group of ranks that need no group: messages, how models and adapters are split, what is refused."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.cluster.parallel import channel as parallel_channel
from mlx_parallm.cluster.parallel import supervisor as parallel_supervisor
from mlx_parallm.cluster.parallel.channel import BEAT, PIECE, SIZES, Channel, Message
from mlx_parallm.cluster.parallel.leading import Leading
from mlx_parallm.cluster.parallel.led_parts import lead_parts
from mlx_parallm.cluster.parallel.rank_group import GroupMember, Leader, group_config
from mlx_parallm.cluster.parallel.split_layers import runs_of, split_model, way_to_split
from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.compute.batching import batch_cache
from mlx_parallm.engine.compute.patch import attach_adapters
from mlx_parallm.engine.compute.tuned import Tuned
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.errors import ConfigError, RankLostError
from mlx_parallm.lora.adapter import Adapter, AdapterError, Part, Target
from mlx_parallm.lora.split import Split
from mlx_parallm.models.forward import Forward
from tests.tiny import tiny


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_messages_come_as_they_were_sent() -> None:
    near, far = connected()
    sender, receiver = Channel(near), Channel(far)
    arrays = (np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32))
    sender.send(BEAT)
    sender.send(Message("decode", ([1, 2], None, {"a": "b"}), arrays).encode())
    found = receiver.receive()
    assert (found.name, found.values) == ("decode", ([1, 2], None, {"a": "b"}))
    for sent, came in zip(arrays, found.arrays, strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert (came == sent).all()
    sender.close()
    with pytest.raises(ConnectionError):
        receiver.receive()
    receiver.close()


def test_large_messages_come_whole() -> None:
    near, far = connected()
    sender, receiver = Channel(near), Channel(far)
    receiver.set_patience(5)
    weights = np.arange(PIECE // 4 + 1000, dtype=np.int32)
    sending = threading.Thread(target=sender.send, args=(Message("adapter", (), (weights,)).encode(),))
    sending.start()
    assert (receiver.receive().arrays[0] == weights).all()
    sending.join()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("room", [0, -1])
def test_a_message_has_no_more_bytes_than_it_may(room: int) -> None:
    near, far = connected()
    sender, receiver = Channel(near), Channel(far)
    encoded = Message("hello", (1, "secret")).encode()
    sender.send(encoded)
    limit = len(encoded) - SIZES.size + room
    if room < 0:
        with pytest.raises(ConnectionError, match="no message of a rank"):
            receiver.receive(limit)
    else:
        assert receiver.receive(limit).values == (1, "secret")
    sender.close()
    receiver.close()


def test_who_says_nothing_for_long_still_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_channel, "BEAT_SECONDS", 0.02)
    near, far = connected()
    sender, receiver = Channel(near), Channel(far)
    receiver.set_patience(0.25)
    sender.beat()
    later = threading.Timer(0.6, sender.send, [Message("plan", (3, 4)).encode()])
    later.start()
    assert receiver.receive().values == (3, 4)
    later.join()
    sender.close()
    receiver.close()


def test_rank_0_hears_that_another_has_failed() -> None:
    near, far = connected()
    other, ours, lost = Channel(near), Channel(far), threading.Event()
    leader = Leader(Rank(0), ServeConfig(), {1: ours})  # type: ignore[arg-type]
    leader.watch(lambda error: lost.set())
    other.send(Message("failed", ("no memory",)).encode())
    assert lost.wait(5)
    assert str(leader.lost) == "rank 1 of 2 has failed: no memory"
    with pytest.raises(RankLostError, match="no memory"):
        leader.send(Message("stop", ()))
    other.close()
    ours.close()


def test_the_supervisor_needs_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert parallel_supervisor.main(words) == 2
        assert "usage: " in capsys.readouterr().err


def test_what_is_no_message_is_refused() -> None:
    near, far = connected()
    receiver = Channel(far)
    near.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ConnectionError):
        receiver.receive()
    near.close()
    receiver.close()


@pytest.mark.parametrize(("layers", "ranks"), [(2, 2), (5, 2), (5, 3), (30, 4)])
def test_every_layer_is_one_ranks(layers: int, ranks: int) -> None:
    runs = runs_of(layers, ranks)
    assert [number for run in runs for number in run] == list(range(layers))
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("kind", "changes", "ways"),
    [
        ("llama", {}, ["tensor", "pipeline", "pipeline"]),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 192}, ["tensor"] * 2),
        ("llama", {"intermediate_size": 129}, ["pipeline"]),
        ("gemma3", {}, ["pipeline", "pipeline"]),
    ],
)
def test_heads_are_split_where_they_divide(kind: str, changes: dict[str, Any], ways: list[str]) -> None:
    module = tiny(kind, **changes).module
    assert [way_to_split(module, ranks) for ranks in range(2, 2 + len(ways))] == ways


def test_parts_of_an_adapter_add_up_to_it() -> None:
    random = np.random.default_rng(0)
    a, b, m = (random.standard_normal(shape).astype(np.float32) for shape in ((2, 6), (4, 2), (4,)))
    adapter = Adapter({path: Part(a, b, m) for path in ("by_outputs", "by_inputs", "whole", "absent")})
    targets = {path: Target("linear", 4, 6) for path in adapter.parts}
    own = {
        "by_outputs": Target("linear", 2, 6),
        "by_inputs": Target("linear", 4, 3),
        "whole": Target("linear", 4, 6),
    }
    parts = [Split(rank, targets).part_of(adapter, own).parts for rank in range(2)]
    assert all(set(part) == set(own) for part in parts)
    product = b @ a
    rows = np.concatenate([part["by_outputs"].b @ part["by_outputs"].a for part in parts])
    columns = np.concatenate([part["by_inputs"].b @ part["by_inputs"].a for part in parts], axis=1)
    np.testing.assert_allclose(rows, product, rtol=1e-6)
    np.testing.assert_allclose(columns, product, rtol=1e-6)
    assert [len(part["by_outputs"].m) for part in parts if part["by_outputs"].m is not None] == [2, 2]
    assert (parts[1]["whole"].b @ parts[1]["whole"].a == product).all()
    with pytest.raises(AdapterError, match="because"):
        Split(0, targets, "because").part_of(adapter, own)


class Second:
    """What a rank's group says of it."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_rl_training": True}, "can't be trained"),
        ({"model_path": ["a=/a", "b=/b"]}, "one model"),
        ({"model_dir": "/models"}, "one model"),
    ],
)
def test_what_a_group_can_not_do_is_an_error_at_start(options: dict[str, Any], words: str) -> None:
    config = ServeConfig.of(**options)
    member: Any = GroupMember(Second(), config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        group_config(config, member)


def test_a_group_keeps_prompts_in_memory_alone() -> None:
    config = ServeConfig.of()
    assert config.cache.ssd
    assert not group_config(config, GroupMember(Second(), config)).cache.ssd  # type: ignore[arg-type]


class Rank:
    """One of two ranks, which are threads here: their sums are computed as soon as both have come to them."""

    meeting = threading.Barrier(2, timeout=20)
    parts: ClassVar[list[mx.array]] = []

    def __init__(self, number: int) -> None:
        self._number = number

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return 2

    def sum(self, part: mx.array) -> mx.array:
        mx.eval(part)
        self.parts.append(part)
        self.meeting.wait()
        total = self.parts[0] + self.parts[1]
        mx.eval(total)
        if self.meeting.wait() == 0:
            self.parts.clear()
        self.meeting.wait()
        return total


def test_ranks_that_have_some_layers_each_give_what_all_layers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.distributed, "all_sum", lambda part, group: group.sum(part))
    tokens = mx.array([[5, 9, 7, 3]])
    expected = tiny("gemma3").module(tokens)
    mx.eval(expected)

    def logits(number: int) -> np.ndarray[Any, Any]:
        module = tiny("gemma3").module
        split = split_model(module, Rank(number))  # type: ignore[arg-type]
        assert split.way == "pipeline"
        here = [bool(layer.parameters()) for layer in module.layers]
        assert here == [number == 0, number == 1], "a rank has its own layers' weights alone"
        return np.array(module(tokens))

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(logits, range(2)):
            np.testing.assert_allclose(found, np.array(expected), atol=1e-4)


@pytest.mark.parametrize(("kind", "cache_kind"), [("llama", "SlotCache"), ("gemma3", "MergedCache")])
def test_the_others_are_told_how_rows_are_reckoned(kind: str, cache_kind: str) -> None:
    model, profile = tiny(kind), DeviceProfile.of("metal")  # whose kernels need not be built here
    layout = attach_adapters(model.module, profile)
    forward = Forward(model.module)
    cache = batch_cache(model, forward, 4, 1 << 30, profile)
    sent: list[Message] = []
    lead_parts(DeviceParts(forward, cache, None, Tuned(DeviceProfile.of("cpu"))), layout, Leading(sent.append))
    name, sizes = sent[0].values
    assert (sent[0].name, name) == ("sizes", cache_kind)
    of_layers = 2 * len(model.module.layers) * 2 * 16 * 4  # keys and values, layers, heads, their width, float32
    assert sizes == ((of_layers, 1 << 30) if cache_kind == "SlotCache" else ())
