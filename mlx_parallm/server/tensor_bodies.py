"""Tensors of requests, checked against a model's signature before they reach the engine's thread, and of responses.

A tensor is nested lists, `{"data": base64, "shape": [...], "dtype": "float32"}` with little-endian numbers in C order,
or part of a safetensors body. Routes call `read_tensors`; what it raises names the input.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.config import nearest
from mlx_parallm.errors import InvalidRequestError, UnprocessableError
from mlx_parallm.server.http.http_errors import TensorJSONResponse
from mlx_parallm.signature import BATCH, Signature, TensorSpec
from mlx_parallm.tensors import DTYPES, SAFETENSORS_TYPES, Array, TensorError, dump_safetensors, parse_safetensors

MAX_ROWS = 1 << 16  # of a request
MAX_OUTPUT = 1 << 25  # numbers of a response
PIECE = 1024  # rows, times dynamic axes, of a request that go through the model together
# Types of JSON values that an input of each kind of dtype takes. They are checked before NumPy converts a list: with
# one long string among the numbers it would store every element as a string of that length.
JSON_TYPES: dict[str, set[type]] = {"f": {int, float}, "i": {int}, "u": {int}, "b": {bool}}
FOUND: dict[type, str] = {float: "floating-point numbers", bool: "booleans", str: "strings", int: "whole numbers"}
Encoding = Literal["json", "base64"]


def is_safetensors(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind in SAFETENSORS_TYPES


def wants_safetensors(request: Request) -> bool:
    """Returns whether the response is to be safetensors: by `Accept`; where that does not say, as the body is."""
    for entry in request.headers.get("accept", "").split(","):
        kind = entry.partition(";")[0].strip().lower()
        if kind in SAFETENSORS_TYPES:
            return True
        if kind == "application/json":
            return False
    return is_safetensors(request)


def parse_body(data: bytes) -> dict[str, Array]:
    try:
        return parse_safetensors(data)
    except TensorError as error:
        raise InvalidRequestError(f"the body: {error}", code="invalid_safetensors") from error


def read_tensors(
    values: Mapping[str, Any], signature: Signature, specs: Sequence[TensorSpec], param: str
) -> dict[str, Array]:
    """An array for each of these inputs, all with one number of rows. `param` is the field that they are in."""
    names = [spec.name for spec in specs]
    for name in values:
        if name not in names:
            raise InvalidRequestError(
                f"{param}: the model has no input {name!r:.60}{nearest(name, names)}", param=param, code="unknown_input"
            )
    arrays: dict[str, Array] = {}
    for spec in specs:
        if spec.name not in values:
            raise InvalidRequestError(
                f"{param}: input {spec.name!r} is missing: {_wanted(spec)}",
                param=f"{param}.{spec.name}",
                code="missing_required_parameter",
            )
        arrays[spec.name] = read_tensor(values[spec.name], spec, f"{param}.{spec.name}")
    check_axes(arrays, signature, specs, param)
    return arrays


def read_tensor(value: Any, spec: TensorSpec, param: str) -> Array:
    """One tensor, of the right rank, sizes, dtype and range; its dynamic axes are still to be compared with others'."""
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, dict):
        array = _decoded(value, spec, param)
    else:
        array = _from_lists(value, spec, param)
    if array.dtype != DTYPES[spec.dtype]:
        raise _wrong(f"has dtype {array.dtype}", spec, param)
    _check_shape(array.shape, spec, param)
    if array.dtype.kind == "f" and spec.finite and not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        raise InvalidRequestError(f"{param} is {array[tuple(place)]} at index {place}: it must be finite", param=param)
    if spec.bounds is not None and array.size:
        wrong = (array < spec.bounds[0]) | (array > spec.bounds[1])
        if wrong.any():
            place = np.argwhere(wrong)[0].tolist()
            limits = f"it must be {spec.bounds[0]} to {spec.bounds[1]}"
            raise InvalidRequestError(f"{param} is {array[tuple(place)]} at index {place}: {limits}", param=param)
    return array


def _wanted(spec: TensorSpec) -> str:
    return f"{spec.dtype} of shape [{', '.join(map(str, spec.shape))}]"


def _wrong(found: str, spec: TensorSpec, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {found}, and the model takes {_wanted(spec)}", param=param)


def _check_shape(shape: Sequence[int], spec: TensorSpec, param: str) -> None:
    if len(shape) != len(spec.shape):
        raise _wrong(f"has {len(shape)} axes, shape {list(shape)}", spec, param)
    for axis, (size, wanted) in enumerate(zip(shape, spec.shape, strict=True)):
        if isinstance(wanted, int) and size != wanted:
            raise _wrong(f"has size {size} in axis {axis}, shape {list(shape)}", spec, param)


def _from_lists(value: Any, spec: TensorSpec, param: str) -> Array:
    depth = 0
    inner = value
    while isinstance(inner, list) and depth <= len(spec.shape):
        depth = depth + 1
        inner = inner[0] if inner else None
    if depth == 0:
        raise InvalidRequestError(
            f"{param} must be nested lists, or an object of data, shape and dtype, not {value!r:.60}", param=param
        )
    if depth != len(spec.shape) and inner is not None:
        raise _wrong(
            f"has {'more than ' if depth > len(spec.shape) else ''}{min(depth, len(spec.shape))} axes", spec, param
        )
    numbers, shape = _flattened(value, len(spec.shape), param)
    dtype = DTYPES[spec.dtype]
    for kind in set(map(type, numbers)) - JSON_TYPES[dtype.kind]:
        raise _wrong(f"holds {FOUND.get(kind, 'something else than numbers')}", spec, param)
    if dtype.kind in "iu" and numbers:
        limits = np.iinfo(dtype)
        wrong = next((one for one in (min(numbers), max(numbers)) if not limits.min <= one <= limits.max), None)
        if wrong is not None:
            place = [int(index) for index in np.unravel_index(numbers.index(wrong), shape)]
            raise InvalidRequestError(f"{param} is {wrong!r:.60} at index {place}, which is no {dtype}", param=param)
    try:
        with np.errstate(all="ignore"):
            return np.array(numbers, np.float64 if dtype.kind == "f" else dtype).astype(dtype).reshape(shape)
    except OverflowError:
        raise InvalidRequestError(f"{param} holds a number that no {dtype} holds", param=param) from None


def _flattened(value: list[Any], depth: int, param: str) -> tuple[list[Any], list[int]]:
    """All numbers of nested lists, and the shape. An empty list ends it."""
    shape = [len(value)]
    level = value
    while len(shape) < depth and level:
        if set(map(type, level)) != {list} or len(set(map(len, level))) > 1:
            raise InvalidRequestError(f"{param} is ragged: lists of one level must have one length", param=param)
        shape.append(len(level[0]))
        level = list(chain.from_iterable(level))
    return level, shape


def _decoded(value: Mapping[str, Any], spec: TensorSpec, param: str) -> Array:
    data = value.get("data")
    shape = value.get("shape")
    dtype = value.get("dtype", spec.dtype)
    if not isinstance(data, str):
        raise InvalidRequestError(f"{param}.data must be base64 in a string", param=f"{param}.data")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidRequestError(
            f"{param}.dtype {dtype!r:.60} is unknown{nearest(dtype, DTYPES)}", param=f"{param}.dtype"
        )
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise InvalidRequestError(
            f"{param}.shape must be a list of sizes, none of them negative, not {shape!r:.60}", param=f"{param}.shape"
        )
    if dtype != spec.dtype:
        raise _wrong(f"has dtype {dtype}", spec, param)
    _check_shape(shape, spec, param)
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{param}.data is not base64: {error}", param=f"{param}.data") from error
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if len(content) != needed:
        raise InvalidRequestError(
            f"{param}.data has {len(content)} bytes, and {dtype} of shape {shape} needs {needed}", param=f"{param}.data"
        )
    array: Array = np.frombuffer(content, DTYPES[dtype].newbyteorder("<")).astype(DTYPES[dtype], copy=False)
    if dtype == "bool" and array.size and array.view(np.uint8).max() > 1:
        raise InvalidRequestError(f"{param}.data holds other bytes than 0 and 1", param=f"{param}.data")
    return array.reshape(shape)


def check_axes(
    arrays: Mapping[str, Array], signature: Signature, specs: Sequence[TensorSpec], param: str
) -> dict[str, int]:
    """The size of each dynamic axis, the batch included: equal in all inputs, and within its limits."""
    limits = {BATCH: (1, MAX_ROWS)} | {axis.name: (axis.least, axis.most) for axis in signature.axes}
    found: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for axis, size in zip(spec.shape, arrays[spec.name].shape, strict=True):
            if not isinstance(axis, str):
                continue
            where = f"{param}.{spec.name}"
            least, most = limits[axis]
            if not least <= size <= most:
                raise InvalidRequestError(
                    f"{where} has {size} of axis {axis!r}, and {least} to {most} are taken", param=where
                )
            first, other = found.setdefault(axis, (size, where))
            if size != first:
                raise InvalidRequestError(
                    f"{where} has {size} of axis {axis!r}, and {other} has {first}: they must be equal", param=where
                )
    sizes = {axis: size for axis, (size, _) in found.items()}
    longest = max([size for axis, size in sizes.items() if axis != BATCH], default=1)
    for spec in signature.outputs:
        numbers = math.prod(dim if isinstance(dim, int) else sizes.get(str(dim), longest) for dim in spec.shape)
        if numbers > MAX_OUTPUT:
            raise InvalidRequestError(
                f"output {spec.name!r} would have {numbers:,} numbers, and at most {MAX_OUTPUT:,} are answered: "
                "send fewer rows",
                param=param,
            )
    return sizes


def pieces(arrays: Mapping[str, Array], specs: Sequence[TensorSpec]) -> list[tuple[int, dict[str, Array]]]:
    """The rows in blocks that go through the model at once, each with the number of its first row."""
    rows = len(arrays[specs[0].name])
    weight = 1
    for spec in specs:
        sizes = zip(spec.shape[1:], arrays[spec.name].shape[1:], strict=True)
        weight = max(weight, math.prod(size for axis, size in sizes if isinstance(axis, str)))
    step = max(1, PIECE // weight)
    if rows <= step:
        return [(0, dict(arrays))]
    return [(at, {name: array[at : at + step] for name, array in arrays.items()}) for at in range(0, rows, step)]


def join(blocks: Sequence[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def written(name: str, array: Array, encoding: Encoding) -> Any:
    """An output as JSON: an array that the response writes as nested lists, or base64."""
    if encoding == "base64":
        data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
        return {"data": data, "shape": list(array.shape), "dtype": str(array.dtype)}
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0].tolist()
        raise UnprocessableError(
            f"output {name!r} is {array[tuple(place)]} at index {place}, and JSON has no such number: ask for base64",
            param="encoding",
            code="not_finite",
        )
    return np.ascontiguousarray(array)


def respond(tensors: Mapping[str, Array], metadata: Mapping[str, str], answer: Mapping[str, Any] | None) -> Response:
    """Answers with JSON; without any, with the tensors as a safetensors file."""
    if answer is None:
        return Response(dump_safetensors(tensors, metadata), media_type=SAFETENSORS_TYPES[0])
    return TensorJSONResponse(answer)
