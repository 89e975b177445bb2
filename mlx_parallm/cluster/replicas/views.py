"""What all replicas say of themselves, as one response: the whole under the usual names, and each part beside it.

The front asks every replica for the same route. Prometheus: sums under the names that one process has, and each
replica's own under `mlx_parallm_replica_…` with the label `replica`, so that nothing is counted twice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from mlx_parallm.cluster.replicas.joined_dashboard import whole_snapshot
from mlx_parallm.metrics import PREFIX
from mlx_parallm.server.api.ops.metrics import JOINS, joined

ReplicaResponses = Mapping[str, bytes]  # by replica
View = Callable[[ReplicaResponses, Sequence[tuple[bytes, bytes]]], bytes]

_SAMPLE = re.compile(rb"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_info", "_created")  # of the samples of one family


def metrics(responses: ReplicaResponses, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    kind = next((value for name, value in headers if name == b"content-type"), b"")
    if b"json" in kind:
        return whole_and_parts(responses, headers)
    found_values: dict[bytes, list[float]] = {}
    order: list[tuple[bytes, bytes]] = []  # (HELP and TYPE lines, or a sample's name and labels)
    parts: list[bytes] = []
    for number, (replica, text) in enumerate(responses.items()):
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found is None:
                if number == 0:
                    order.append((b"text", line))
                continue
            key = found["name"] + (b"{" + found["labels"] + b"}" if found["labels"] else b"")
            if key not in found_values:
                order.append((b"sample", key))
                found_values[key] = []
            found_values[key].append(float(found["value"]))
            parts.append(_part(found, replica))
    lines = [line if kind == b"text" else _sample(line, found_values[line]) for kind, line in order]
    return b"\n".join([*lines, *sorted(parts)]) + b"\n"


def _sample(key: bytes, values: Sequence[float]) -> bytes:
    name = key.partition(b"{")[0].decode().removeprefix(PREFIX)
    for suffix in _SUFFIXES:
        if name not in JOINS:
            name = name.removesuffix(suffix)
    return key + b" " + repr(joined(name, values)).encode()


def _part(found: "re.Match[bytes]", replica: str) -> bytes:
    labels = b'replica="' + replica.encode() + b'"' + (b"," + found["labels"] if found["labels"] else b"")
    name = found["name"].removeprefix(PREFIX.encode())
    return PREFIX.encode() + b"replica_" + name + b"{" + labels + b"} " + found["value"]


def whole_and_parts(responses: ReplicaResponses, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """JSON objects of numbers: their sums, and each under `replicas`."""
    parts = {replica: orjson.loads(body) for replica, body in responses.items()}
    return orjson.dumps({**_total("", list(parts.values())), "replicas": parts})


def _total(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        every = [value for value in values if isinstance(value, dict)]
        names = dict.fromkeys(key for value in every for key in value)
        return {key: _total(key, [value[key] for value in every if key in value]) for key in names}
    if isinstance(first, list) and all(isinstance(one, int | float) for one in first):
        return [sum(column) for column in zip(*values, strict=False)]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return joined(name, values)


def models(responses: ReplicaResponses, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The models of all replicas, each with its status on every one."""
    whole: dict[str, Any] = {}
    entries: dict[str, dict[str, Any]] = {}
    for replica, body in responses.items():
        listed = orjson.loads(body)
        whole = whole or listed
        for entry in listed.get("data", []):
            known = entries.setdefault(entry["id"], {**entry, "replicas": {}})
            known["replicas"][replica] = entry.get("status", "ready")
    return orjson.dumps({**whole, "data": list(entries.values())})


def first(responses: ReplicaResponses, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns the first replica's response, for what all replicas are told and answer alike."""
    return next(iter(responses.values()))


def snapshot(responses: ReplicaResponses, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return orjson.dumps(whole_snapshot({replica: orjson.loads(body) for replica, body in responses.items()}))


def _newest(name: str) -> View:
    """The lists under that name, the newest first, each entry with its replica."""

    def view(responses: ReplicaResponses, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        whole: dict[str, Any] = {}
        entries: list[dict[str, Any]] = []
        for replica, body in responses.items():
            found = orjson.loads(body)
            whole = {**found, **whole, "adapters": _union(whole.get("adapters"), found.get("adapters"))}
            entries += [{**entry, "replica": replica} for entry in found[name]]
        entries.sort(key=lambda entry: entry["time"], reverse=True)
        return orjson.dumps({key: value for key, value in whole.items() if value is not None} | {name: entries})

    return view


def _union(*names: list[str] | None) -> list[str] | None:
    known = [one for one in names if one is not None]
    return list(dict.fromkeys(name for one in known for name in one)) if known else None


VIEWS: dict[str, View] = {  # by what a route declares of its replicas
    "metrics": metrics,
    "whole_and_parts": whole_and_parts,
    "models": models,
    "snapshot": snapshot,
    "requests": _newest("requests"),
    "rollouts": _newest("groups"),
    "logout": first,
}
