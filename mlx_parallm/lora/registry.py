"""Names, versions and places of adapters. The engine owns one per model.

A name has versions; the newest published is what the name means, until a rollback. A version that rows use is never
given up under them: they hold it, and it goes when the last has ended. All known versions are kept packed in memory; a
bounded number of them is on the device: the least recently used makes room, and a publish takes those off that it or an
earlier one has replaced, unless rows use them. The model's own name may serve an adapter too, or several, each with its
share of the requests. Any thread may look names up and ask for changes; the engine thread makes these between steps.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mlx_parallm.arms import AutoSplit
from mlx_parallm.errors import ModelNotFoundError
from mlx_parallm.lora.adapter import Adapter, AdapterError, Target, check_fit, check_name, with_paths_of
from mlx_parallm.lora.layout import Layout, PackedAdapter
from mlx_parallm.lora.row_adapters import AdapterStack, GroupedLoRA, Resident, RowAdapters, width_of
from mlx_parallm.lora.traffic import Traffic
from mlx_parallm.types import AdapterRoute, AdapterVersion

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", bound=AdapterVersion)

KEPT_VERSIONS = 4  # of a name, for rollbacks, beside those that are pinned or in use
MAX_PINNED = 16  # versions of a name
STACKS_KEPT = 4
REMEMBERED_NAMES = 4096  # that were unloaded: their numbers are not given out again


@dataclass(slots=True, eq=False, kw_only=True)
class Version(AdapterVersion):
    """A version whose weights are in this process."""

    packed: PackedAdapter


@dataclass(slots=True, eq=False)
class Entry:
    name: str
    versions: dict[int, Version] = field(default_factory=dict)
    current: int = 0


class BetweenSteps(Protocol):
    """Runs a change on the engine thread, between two steps, and returns or raises what comes of it."""

    def __call__(self, change: Callable[[], T]) -> T: ...


def _at_once(change: Callable[[], T]) -> T:
    return change()


def between_steps(method: "Callable[Concatenate[Registry, P], T]") -> "Callable[Concatenate[Registry, P], T]":
    """A method that may be called on any thread but the engine's, which runs it."""

    @wraps(method)
    def run(registry: "Registry", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return registry.run_between_steps(partial(method, registry, *args, **kwargs))

    return run


class Registry:
    def __init__(
        self,
        layout: Layout,
        max_resident: int,
        max_names: int = 256,
        max_rank: int = 256,
        *,
        run_between_steps: BetweenSteps = _at_once,
        observe: Callable[[float], None] = lambda seconds: None,  # what a change has cost the engine
    ) -> None:
        self._layout = layout
        self._max_rank = max_rank
        self._observe = observe
        self.run_between_steps = run_between_steps
        self.changes = 0  # how often a name has come to mean another version
        self.max_resident = max_resident
        self.max_names = max_names
        self.swaps = 0  # adapters copied to the device
        self.joins = 0  # stacks of adapters put together
        self.base = AdapterVersion(name="base", number=0, source="", rank=0, bytes=0)  # of completions without any
        self.traffic = Traffic(self._serve)
        self.chosen = False  # somebody has said what it serves; until then, what was loaded without a name
        self._latest = ""  # the name published last
        self._last_numbers: OrderedDict[str, int] = OrderedDict()  # of names that were unloaded
        self._entries: dict[str, Entry] = {}
        self._residents: OrderedDict[Version, Resident] = OrderedDict()  # the longest unused first
        self._columns = 0  # of the widest mixture yet
        self._stacks: OrderedDict[tuple[Resident, ...], AdapterStack] = OrderedDict()

    # From any thread.

    @property
    def targets(self) -> Mapping[str, Target]:
        return self._layout.targets

    def pack(self, adapter: Adapter) -> PackedAdapter:
        return self._layout.pack(adapter)

    def find(self, name: str, number: int | None = None) -> Version:
        """The version that a name means now, or a given one."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFoundError(f"there is no model or adapter {name!r}")
        wanted = entry.current if number is None else number
        version = entry.versions.get(wanted)
        if version is None:
            known = ", ".join(map(str, sorted(entry.versions)))
            raise ModelNotFoundError(f"adapter {name!r} has no version {wanted}; it has {known}")
        return version

    def versions(self, name: str) -> list[Version]:
        entry = self._entries.get(name)
        return [] if entry is None else list(entry.versions.values())

    def newest(self, version: V) -> V | Version:
        """Returns the version that the name of this one means now; itself, once the name is gone."""
        entry = self._entries.get(version.name)
        return version if entry is None else entry.versions[entry.current]

    def route(self) -> Version | None:
        """Returns what the next request for the model's own name gets: each route in turn, by its share."""
        chosen = self.traffic.next_route()
        return None if chosen is None or chosen.name is None else self.find(chosen.name, chosen.number)

    @property
    def policy_name(self) -> str | None:
        """The adapter that the model's own name serves, by the largest share; else the one that was published last."""
        names = [route for route in self.routes if route.name is not None]
        if names:
            return max(names, key=lambda route: route.share).name
        return self._latest if self._latest in self._entries else None

    @property
    def routes(self) -> Sequence[AdapterRoute]:
        """The routes that the model's own name serves; empty: the model alone."""
        return self.traffic.routes

    @property
    def auto(self) -> AutoSplit | None:
        return self.traffic.auto

    @property
    def served_version(self) -> int:
        """The version that the model's own name serves, the largest share where there are several; 0: the model."""
        routes = self.routes
        if not routes:
            return 0
        largest = max(routes, key=lambda route: route.share)
        return 0 if largest.name is None else self.find(largest.name, largest.number).number

    @property
    def policy_version(self) -> int:
        """The same; where the model's own name serves the model alone, what the name that was published last means."""
        entry = self._entries.get(self._latest)
        return self.served_version if self.routes or entry is None else entry.current

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def resident_bytes(self) -> int:
        return sum(resident.nbytes for resident in list(self._residents.values()))

    def publish(
        self,
        name: str,
        adapter: Adapter,
        source: str,
        number: int | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        own: bool = False,
    ) -> Version:
        """A new version, which the name means now; `own`: the model's own name too, unless somebody chose otherwise."""
        packed = self.pack(self.check(name, adapter))  # here, not on the engine thread
        return self._publish(name, packed, source, number, config, own)

    def check(self, name: str, adapter: Adapter) -> Adapter:
        """Raises unless the adapter fits the model; returns it with the model's own names of layers."""
        check_name(name)
        adapter = with_paths_of(adapter, self.targets)
        check_fit(adapter, self.targets, self._max_rank)
        return adapter

    @between_steps
    def _publish(
        self,
        name: str,
        packed: PackedAdapter,
        source: str,
        number: int | None,
        config: Mapping[str, Any] | None,
        own: bool,
    ) -> Version:
        begun = time.perf_counter()
        if name not in self._entries and len(self._entries) >= self.max_names:
            raise AdapterError(
                f"{len(self._entries)} adapters are loaded, as many as --max-cpu-loras allows: unload one first",
                param="name",
                code="too_many_adapters",
            )
        entry = self._entries.get(name) or Entry(name)
        newest = max(entry.versions, default=self._last_numbers.get(name, 0))
        if number is not None and number <= newest:
            raise AdapterError(f"version {number} of {name!r} is not newer than {newest}", param="version")
        version = Version(
            name=name,
            number=newest + 1 if number is None else number,
            source=source,
            rank=packed.unpadded_rank,
            bytes=packed.unpadded_bytes,
            config=config,
            packed=packed,
            digest=packed.digest,
        )
        entry.versions[version.number] = version
        entry.current = version.number
        self._entries[name] = entry
        self._latest = name
        if own and not self.chosen:
            self.traffic.set_routes([AdapterRoute(name, None, 1.0)])
        self._forget_old(entry)
        self._take_off(self._unneeded(entry))
        self.changes += 1
        self._observe(time.perf_counter() - begun)
        return version

    def serve(self, routes: Sequence[AdapterRoute], auto: AutoSplit | None = None) -> None:
        """Sets what the model's own name serves from now on. `auto`: until a rule finds the better of them."""
        self.traffic.serve(routes, auto)

    @between_steps
    def _serve(self, routes: Sequence[AdapterRoute]) -> None:
        for route in routes:
            if route.name is not None:
                self.find(route.name, route.number)
        self.chosen = True
        self.traffic.set_routes(routes)

    def note_reward(self, name: str | None, number: int, reward: float) -> None:
        """A completion of this adapter version got a reward. Not on the engine thread."""
        known = [self.base] if name is None else [one for one in self.versions(name) if one.number == number]
        names = ("base",) if name is None else (f"{name}@{number}", name)
        self.traffic.note_reward(known[0].stats if known else None, names, reward)

    @between_steps
    def pin(self, name: str, number: int | None, pinned: bool) -> Version:
        """Keeps a version, or lets it go the way of all others."""
        version = self.find(name, number)
        others = [one.number for one in self.versions(name) if one.pinned and one is not version]
        if pinned and len(others) >= MAX_PINNED:
            raise AdapterError(
                f"{len(others)} versions of {name!r} are pinned already, and no more are kept: unpin one of "
                f"{', '.join(map(str, sorted(others)))} first",
                param="version",
                code="too_many_pinned",
            )
        version.pinned = pinned
        self._forget_old(self._entries[name])
        return version

    @between_steps
    def rollback(self, name: str, number: int | None = None) -> Version:
        """Back to an earlier version; without a number, to the one before."""
        version = self.find(name)
        if number is None:
            earlier = [other for other in self._entries[name].versions if other < version.number]
            if not earlier:
                raise AdapterError(f"adapter {name!r} has no version before {version.number}", param="version")
            number = max(earlier)
        version = self.find(name, number)
        self._entries[name].current = version.number
        self.changes += 1
        return version

    @between_steps
    def unload(self, name: str, *, remember: bool = True) -> None:
        """Forgets a name; rows keep what they hold. Without `remember`, its numbers may come again."""
        self.find(name)
        if any(route.name == name for route in self.routes):
            if self.chosen:
                raise AdapterError(
                    f"{name!r} is what the model's own name serves: /model/switch-lora to another first", param="name"
                )
            self.traffic.set_routes([])
        entry = self._entries.pop(name)
        if remember:
            self._last_numbers[name] = max(entry.versions)  # a number means one set of weights, for ever
            self._last_numbers.move_to_end(name)
        while len(self._last_numbers) > REMEMBERED_NAMES:
            self._last_numbers.popitem(last=False)
        self._take_off(version for version in entry.versions.values() if not version.rows)

    # On the engine thread.

    def hold(self, version: Version) -> None:
        version.rows += 1

    def release(self, version: Version) -> None:
        version.rows -= 1
        assert version.rows >= 0, f"{version.label} is released twice"
        if not version.rows:
            entry = self._entries.get(version.name)
            if entry is None or entry.versions.get(version.number) is not version:
                self._take_off([version])  # it was unloaded or replaced meanwhile
            else:
                self._forget_old(entry)

    def count_request(self, version: Version | None) -> None:
        (version or self.base).requests += 1

    def count_end(self, version: Version | None, seconds: float) -> None:
        (version or self.base).stats.add_end(seconds)

    def count_tokens(self, version: Version | None, tokens: int) -> None:
        (version or self.base).tokens += tokens

    def row_adapters(self, versions: Sequence[Version | None]) -> RowAdapters:
        """The adapters of a pass's rows, of whom at least one has one."""
        distinct = sorted({version for version in versions if version is not None}, key=lambda v: (v.name, v.number))
        residents = {version: self._resident(version, distinct) for version in distinct}
        rows = [None if version is None else residents[version] for version in versions]
        if not self._layout.traced:
            return GroupedLoRA(rows)
        members = tuple(residents.values())
        # A kernel reads a row's own columns alone: width costs nothing.
        steady = self._layout.active.kernels.has_adder
        if steady and width_of(members) > self._columns:
            self._columns = width_of(members)
            self._stacks.clear()
        if members not in self._stacks:
            self.joins += 1
            self._stacks[members] = self._layout.stack(members, self._columns)
            while len(self._stacks) > STACKS_KEPT:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(members)
        return self._stacks[members].for_rows(rows, steady)

    def reset_device(self) -> None:
        """Takes every adapter off the device; the next pass that needs one uploads it again."""
        self._residents.clear()
        self._stacks.clear()

    def check_integrity(self) -> None:
        assert len(self._residents) <= self.max_resident, "more adapters on the device than there is room for"
        for entry in self._entries.values():
            assert entry.current in entry.versions, f"{entry.name} means a version that is gone"
            assert all(version.rows >= 0 for version in entry.versions.values())

    def _resident(self, version: Version, needed: Sequence[Version]) -> Resident:
        if version not in self._residents:
            while len(self._residents) >= self.max_resident:
                unneeded = next(other for other in self._residents if other not in needed)
                self._take_off([unneeded])
            self._residents[version] = self._layout.place(version.packed)
            self.swaps += 1
        self._residents.move_to_end(version)
        return self._residents[version]

    def _forget_old(self, entry: Entry) -> None:
        """Keeps the current version, those in use or pinned, and a few before."""
        free = self._unneeded(entry)
        gone = sorted(free, key=lambda v: v.number)[: max(0, len(free) - KEPT_VERSIONS)]
        for version in gone:
            del entry.versions[version.number]
        self._take_off(gone)

    def _unneeded(self, entry: Entry) -> list[Version]:
        """Versions that nobody has, nor gets unless asking for them by number."""
        routed = {route.number for route in self.routes if route.name == entry.name}
        return [
            v
            for v in entry.versions.values()
            if v.number != entry.current and not v.rows and not v.pinned and v.number not in routed
        ]

    def _take_off(self, versions: Iterable[Version]) -> None:
        """Frees the device of versions, and of what they are part of."""
        gone = {self._residents.pop(version) for version in versions if version in self._residents}
        for members in [members for members in self._stacks if not gone.isdisjoint(members)]:
            del self._stacks[members]
