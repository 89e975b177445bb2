"""A rank that follows: it has its part of the model and of the caches, and does with them what rank 0 does.

It has no scheduler, no sampler and no HTTP server. It ends with rank 0: when that says so, or when it is gone.
"""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from mlx_parallm.cluster.parallel.channel import Array, Message
from mlx_parallm.cluster.parallel.rank_group import GroupMember
from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.machine_memory import wire_memory
from mlx_parallm.engine.build import LoadedModel, device_parts
from mlx_parallm.engine.compute.patch import patch_layers
from mlx_parallm.engine.loop import IDLE_CACHE_SECONDS
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.engine.start import plan_engines
from mlx_parallm.errors import ModelLoadError
from mlx_parallm.kv.block_pool import Match
from mlx_parallm.kv.merged import copied, held_arrays, state_arrays
from mlx_parallm.lora.adapter import Adapter, Part
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.row_adapters import GroupedLoRA, Resident
from mlx_parallm.models.loader import load
from mlx_parallm.server.http.server_process import StopSignals

log = logging.getLogger(__name__)


def follow(config: ServeConfig, member: GroupMember) -> int:
    """Does what rank 0 does until it ends; returns the exit code."""
    _leave_signals_to_rank_0()
    try:
        follower = _brought_up(config, member)
    except Exception as error:
        log.exception("rank %d can't be brought up", member.rank)
        member.tell_rank_0(Message("failed", (str(error),)))
        return 1
    log.info("rank %d of %d is ready", member.rank, member.size)
    try:
        follower.run(member.messages)
    except Exception as error:
        log.exception("rank %d has failed", member.rank)
        member.tell_rank_0(Message("failed", (f"{type(error).__name__}: {error}",)))
        return 1
    return 0


def _leave_signals_to_rank_0() -> None:
    """It has requests to finish first, and its end is this one's; a second signal is obeyed."""
    signals = StopSignals()

    def on_signal(number: int, frame: Any) -> None:
        if signals.ends_at_once():
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def _brought_up(config: ServeConfig, member: GroupMember) -> "Follower":
    """The same steps as an engine's, in the same order: some of them are passes that all ranks compute."""
    profile = member.profile(this_device().profile)
    ((name, source),) = config.named_models().items()
    model = load(
        source,
        name=name,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        trust_remote_code=config.model.trust_remote_code,
        split=member.split,
    )
    loaded = LoadedModel(model, patch_layers(model.module, profile, member.adapter_split))
    (plan,) = plan_engines([loaded], config)
    plan = member.agree(model, plan)
    wire_memory()
    mx.set_cache_limit(plan.kept)
    parts = device_parts(config, profile, loaded, plan, split=True)
    return Follower(parts, loaded.layout, *member.messages.get().values)


class Follower:
    def __init__(self, parts: DeviceParts, layout: Layout, kind: str, sizes: Sequence[int]) -> None:
        if type(parts.cache).__name__ != kind:
            raise ModelLoadError(f"rows run in a {kind} on rank 0 and in a {type(parts.cache).__name__} here")
        self._forward = parts.forward
        self._cache = parts.cache
        self._prefix = parts.prefix
        self._layout = layout
        self._objects: dict[int, Any] = {}  # caches of prompts, snapshots and adapters, by rank 0's numbers
        self._adapters: tuple[Any, GroupedLoRA | None] = (None, None)  # of the last pass that had any
        parts.cache.adopt_sizes(sizes)  # rows get the same places everywhere if all reckon alike

    def run(self, messages: "SimpleQueue[Message]") -> None:
        handlers = self._handlers()
        while True:
            try:
                message = messages.get(timeout=IDLE_CACHE_SECONDS)
            except Empty:
                mx.clear_cache()
                message = messages.get()
            if message.name == "stop":
                return
            handlers[message.name](*message.values, *message.arrays)

    def _handlers(self) -> dict[str, Callable[..., object]]:
        store = None if self._prefix is None else self._prefix.store  # snapshots are in none
        handlers: dict[str, Callable[..., object]] = {
            "rows.expect": self._cache.expect,
            "rows.leave": self._cache.leave,
            "rows.compact": self._cache.compact,
            "rows.reset": self._cache.reset,
            "stage": self._stage,
            "prompt": self._prompt,
            "join": lambda number, prompts: self._cache.join(self._objects[number], prompts),
            "decode": self._decode,
            "fill": self._fill,
            "keep": self._keep,
            "snapshot": self._snapshot,
            "restore": self._restore,
            "adapter": self._adapter,
            "free": self._free,
        }
        if store is not None:
            handlers |= {"blocks.clear": store.clear, "blocks.drop_from": store.drop_from}
        return handlers

    def _stage(self, number: int, rows: int, capacity: int) -> None:
        self._objects[number] = self._cache.stage(rows, capacity)

    def _prompt(self, number: int, index: list[int] | None, adapters: list[int | None] | None, tokens: Array) -> None:
        staged = self._objects[number]
        context = self._row_adapters(adapters)
        if index is None:
            logits = self._forward(mx.array(tokens), staged, context)
        else:
            logits = self._forward.at(mx.array(tokens), staged, mx.array(index), context)
        mx.eval(logits, state_arrays(staged))

    def _decode(self, lengths: list[int], adapters: list[int | None] | None, tokens: Array) -> None:
        context = self._row_adapters(adapters)
        mx.eval(self._cache.decode(self._forward, mx.array(tokens), lengths, context), self._cache.pending())

    def _row_adapters(self, numbers: list[int | None] | None) -> GroupedLoRA | None:
        if numbers is None:
            return None
        if self._adapters[0] != numbers:
            rows: list[Resident | None] = [None if number is None else self._objects[number] for number in numbers]
            self._adapters = numbers, GroupedLoRA(rows)
        return self._adapters[1]

    def _fill(self, number: int, blocks: Sequence[list[int]], length: int) -> None:
        assert self._prefix is not None
        self._objects[number] = self._prefix.fill(self._objects[number], [Match(ids, length) for ids in blocks])

    def _keep(self, number: int | None, row: int, numbers: list[int], ids: list[int]) -> None:
        assert self._prefix is not None
        assert self._prefix.store is not None
        layers = self._cache.layers if number is None else self._objects[number]
        self._prefix.store.write([side for layer in layers for side in (layer.keys, layer.values)], row, numbers, ids)

    def _snapshot(self, number: int, staged: int) -> None:
        self._objects[number] = kept = [copied(cache) for cache in self._objects[staged]]
        mx.eval(held_arrays(kept))

    def _restore(self, number: int, snapshot: int) -> None:
        self._objects[number] = [copied(cache) for cache in self._objects[snapshot]]

    def _adapter(self, number: int, layers: Sequence[tuple[str, bool]], *arrays: Array) -> None:
        rest = iter(arrays)
        parts = {path: Part(next(rest), next(rest), next(rest) if dora else None) for path, dora in layers}
        self._objects[number] = self._layout.place(self._layout.pack(Adapter(parts)))

    def _free(self, numbers: list[int]) -> None:
        for number in numbers:
            self._objects.pop(number, None)
        if self._adapters[0] is not None and not set(numbers).isdisjoint(self._adapters[0]):
            self._adapters = None, None
            self._forward.forget()
