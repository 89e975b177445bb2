"""One model over several processes: how they find each other, and what each is to the others.

`mlx.launch` starts the same command for every rank; `join_group` says which one this is. Rank 0 is the `Leader`: it
serves, schedules and samples, and sends what it does with its part of the model to the others. Each of those is a
`GroupMember` that does the same with its own part (`parallel_follower`). MLX's collectives carry the passes' sums, a
TCP connection to rank 0 everything else.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.cluster.parallel.channel import (
    CONNECT_SECONDS,
    PATIENT_SECONDS,
    SILENCE_SECONDS,
    Channel,
    Message,
    connect,
    on_thread,
)
from mlx_parallm.cluster.parallel.leading import Leading
from mlx_parallm.cluster.parallel.led_parts import lead_parts
from mlx_parallm.cluster.parallel.split_layers import ModelSplit, split_model
from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.profile import DeviceProfile
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.errors import ConfigError, ModelLoadError, RankLostError
from mlx_parallm.host import to_numpy
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.split import Split
from mlx_parallm.metrics import MemoryPlan
from mlx_parallm.models.language import LanguageModel

log = logging.getLogger(__name__)

LAUNCHED = ("MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # what mlx.launch and MPI set for each rank
ADDRESS_BYTES = 512
MAX_HELLO = 1024  # bytes: whoever sends more is no rank
NOTICE_SECONDS = 1.0
AGREE_SECONDS = 600.0  # for the slowest rank to load its part


class GroupMember:
    """A rank, and its connection to rank 0."""

    def __init__(self, group: mx.distributed.Group, config: ServeConfig, channel: Channel | None = None) -> None:
        """`channel`: to rank 0, which has none."""
        self.group = group
        self.messages: SimpleQueue[Message] = SimpleQueue()  # of rank 0
        self._config = config
        self._channel = channel
        self._split: ModelSplit | None = None
        if channel is not None:
            channel.beat()
            on_thread("rank 0", partial(self._follow, channel))

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def adapter_split(self) -> Split:
        assert self._split is not None
        return self._split.adapters

    def split(self, module: nn.Module) -> None:
        self._split = split_model(module, self.group)
        if self.rank == 0:
            how = "heads, tensor parallel" if self._split.way == "tensor" else "layers, as a pipeline"
            log.info("the model is split over %d ranks by its %s", self.size, how)

    def profile(self, profile: DeviceProfile) -> DeviceProfile:
        """Passes are not traced, and each is read before the next begins: its tokens go to the others."""
        return replace(profile, steps_in_flight=0, compiled=False, fused=False)

    def agree(self, model: LanguageModel, plan: MemoryPlan) -> MemoryPlan:
        """Tells rank 0 what this rank has memory for, and takes what it decides."""
        self.tell_rank_0(Message("plan", (plan.rows, plan.blocks, self._settings(model))))
        response = self.messages.get()
        if response.name != "plan":
            raise ModelLoadError("rank 0 has ended")
        rows, blocks = response.values
        return replace(plan, rows=rows, blocks=blocks)

    def tell_rank_0(self, message: Message) -> None:
        assert self._channel is not None
        self._channel.send(message.encode())

    def _follow(self, channel: Channel) -> None:
        """Takes messages as they come; without rank 0 the process ends, wherever it is."""
        try:
            while True:
                self.messages.put(message := channel.receive())
                if message.name == "stop":
                    return
        except (OSError, ValueError) as error:
            log.critical("rank 0 is gone (%s): rank %d ends", error, self.rank)
            end_at_once(1)

    def _settings(self, model: LanguageModel) -> dict[str, Any]:
        """Returns what must be the same for all ranks."""
        cache = self._config.cache
        batch = self._config.batch
        assert self._split is not None
        return {
            "config.json": hashlib.sha256(json.dumps(model.config, sort_keys=True, default=str).encode()).hexdigest(),
            "precision": model.precision,
            "split": self._split.way,
            "--max-batch-size": batch.max_batch_size,
            "--max-model-len": model.context_length,
            "--block-size": cache.block_size,
            "--num-blocks": cache.num_blocks,
            "--sequence-cache-size": cache.sequence_cache_size,
            "--kv-bits": cache.kv_bits,
            "--kv-group-size": cache.kv_group_size,
        }


class Leader(GroupMember):
    """Rank 0. Implements `engine.ranks.Ranks`."""

    def __init__(self, group: mx.distributed.Group, config: ServeConfig, channels: dict[int, Channel]) -> None:
        super().__init__(group, config)
        self._channels = channels
        self._plans: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._on_lost: Callable[[Exception], None] | None = None
        self._closing = False
        self.lost: RankLostError | None = None
        self.leading = Leading(self.send)
        for rank, channel in channels.items():
            channel.beat()
            on_thread(f"rank {rank}", partial(self._listen, rank, channel))

    def send(self, message: Message) -> None:
        """Sends a message to all other ranks."""
        if self._closing:
            return
        if self.lost is not None:
            raise self.lost
        encoded = message.encode()
        for rank, channel in self._channels.items():
            try:
                channel.send(encoded)
            except OSError as error:
                self._lose(rank, f"can't be reached ({error})")
                assert self.lost is not None
                raise self.lost from error

    def agree(self, model: LanguageModel, plan: MemoryPlan) -> MemoryPlan:
        """The least that any rank has memory for."""
        settings = self._settings(model)
        rows = plan.rows
        blocks = plan.blocks
        for _ in self._channels:
            rank, message = self._plans.get(timeout=AGREE_SECONDS)
            its_rows, its_blocks, its_settings = message.values
            other = [name for name, value in settings.items() if its_settings.get(name) != value]
            if other:
                raise ModelLoadError(f"rank {rank} differs from rank 0 in {', '.join(other)}")
            rows = min(rows, its_rows)
            blocks = min(blocks, its_blocks)
        self.send(Message("plan", (rows, blocks)))
        return replace(plan, rows=rows, blocks=blocks)

    def lead(self, parts: DeviceParts, layout: Layout) -> DeviceParts:
        return lead_parts(parts, layout, self.leading)

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        self._on_lost = on_lost
        for channel in self._channels.values():
            channel.set_patience(SILENCE_SECONDS)
        if self.lost is not None:
            on_lost(self.lost)

    def cause_of(self, error: Exception) -> Exception:
        """MLX may notice that a connection is gone before we know whose."""
        deadline = time.monotonic() + NOTICE_SECONDS
        while self.lost is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.lost or error

    def close(self) -> None:
        if self.lost is None:
            self.send(Message("stop", ()))
        self._closing = True

    def _listen(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive()
                if message.name == "failed":
                    return self._lose(rank, f"has failed: {message.values[0]}")
                self._plans.put((rank, message))
        except TimeoutError:
            self._lose(rank, "has not been heard of for some seconds: it hangs, or its machine is gone")
        except (OSError, ValueError) as error:
            self._lose(rank, f"has ended ({error})")

    def _lose(self, rank: int, what: str) -> None:
        if self._closing or self.lost is not None:
            return
        self.lost = RankLostError(f"rank {rank} of {self.size} {what}")
        log.critical("%s", self.lost)
        if self._on_lost is None:  # still loading, and perhaps in a pass that never ends
            end_at_once(1)
        else:
            self._on_lost(self.lost)


def end_at_once(code: int) -> None:
    """Ends the process without waiting for threads, which may be in a pass that never ends."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def join_group(config: ServeConfig) -> GroupMember | None:
    """This process as a member of the group that mlx.launch has started; None where it is alone."""
    wanted = config.cluster.use_distributed
    launched = wanted is not False and any(name in os.environ for name in LAUNCHED)
    group = mx.distributed.init() if launched else None
    if group is None or group.size() == 1:
        if wanted:
            raise ConfigError("use_distributed is on, and mlx.launch has not started this process as one of several")
        return None
    secret = secrets.token_hex(32)
    listener = socket.create_server((own_address(), 0)) if group.rank() == 0 else None
    host, port = listener.getsockname()[:2] if listener is not None else ("", 0)
    found = json.loads(_from_rank_0(json.dumps([host, port, secret]), group))
    if listener is None:
        channel = connect((found[0], found[1]))
        channel.send(Message("hello", (group.rank(), found[2])).encode())
        return GroupMember(group, config, channel)
    with listener:
        return Leader(group, config, _accept_all(listener, group.size() - 1, secret))


def group_config(config: ServeConfig, member: GroupMember) -> ServeConfig:
    """What a group can do of a config; raises for what it can't."""
    if config.trains:
        raise ConfigError("a model that is split over several ranks can't be trained: leave --enable-rl-training out")
    if len(config.named_models()) != 1 or config.model.model_dir is not None:
        raise ConfigError("a group of ranks serves one model: name one with --model-path, and no --model-dir")
    if config.cache.ssd and member.rank == 0:
        log.info("cached prompts stay in memory: each rank has only its part of them, so none goes to the SSD")
    return config.but(ssd=False)


def own_address() -> str:
    """Returns the address at which the other ranks reach rank 0, as mlx.launch knows it."""
    if hostfile := os.environ.get("MLX_HOSTFILE"):
        first: str = json.loads(Path(hostfile).read_text())[0][0]
        return first.rpartition(":")[0]
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    return os.environ.get("NCCL_HOST_IP") or socket.gethostbyname(socket.gethostname())


def _from_rank_0(text: str, group: mx.distributed.Group) -> str:
    data = text.encode() if group.rank() == 0 else b""
    padded = mx.array(list(data.ljust(ADDRESS_BYTES, b"\0")), mx.int32)
    return bytes(to_numpy(mx.distributed.all_sum(padded, group=group)).tolist()).rstrip(b"\0").decode()


def _accept_all(listener: socket.socket, count: int, secret: str) -> dict[int, Channel]:
    """Connections of ranks that know the secret; whoever else connects is turned away."""
    listener.settimeout(CONNECT_SECONDS)
    channels: dict[int, Channel] = {}
    while len(channels) < count:
        channel = Channel(listener.accept()[0])
        channel.set_patience(SILENCE_SECONDS)
        try:
            rank, shown = channel.receive(limit=MAX_HELLO).values
        except (OSError, ValueError, TypeError):
            channel.close()
            continue
        if hmac.compare_digest(str(shown).encode(), secret.encode()):
            channel.set_patience(PATIENT_SECONDS)
            channels[int(rank)] = channel
        else:
            channel.close()
    return channels
