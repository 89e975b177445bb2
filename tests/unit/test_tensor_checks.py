"""Tensors of requests: axes that must agree, answers that would be too large, numbers that JSON has not."""

import base64

import numpy as np
import pytest

from mlx_parallm.errors import InvalidRequestError, UnprocessableError
from mlx_parallm.server.tensor_bodies import pieces, read_tensor, read_tensors, written
from mlx_parallm.signature import Axis, Signature, TensorSpec
from mlx_parallm.tensors import TensorError, dump_safetensors, parse_safetensors

PAIR = Signature(
    inputs=(TensorSpec(name="a", shape=("batch", "time")), TensorSpec(name="b", shape=("batch", "time", 2))),
    outputs=(TensorSpec(name="y", shape=("batch", "time", 1 << 20)),),
    axes=(Axis("time", 2, 8),),
)


def read(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    values = {"a": np.zeros(a, np.float32), "b": np.zeros(b, np.float32)}
    read_tensors(values, PAIR, PAIR.inputs, "inputs")


def test_axes_agree_and_answers_are_bounded() -> None:
    read((3, 4), (3, 4, 2))
    for a, b, message in (
        ((3, 4), (2, 4, 2), r"inputs.b has 2 of axis 'batch', and inputs.a has 3: they must be equal"),
        ((3, 4), (3, 5, 2), r"inputs.b has 5 of axis 'time', and inputs.a has 4"),
        ((3, 9), (3, 9, 2), r"inputs.a has 9 of axis 'time', and 2 to 8 are taken"),
        ((0, 4), (0, 4, 2), r"inputs.a has 0 of axis 'batch', and 1 to 65536 are taken"),
        ((8, 8), (8, 8, 2), r"output 'y' would have 67,108,864 numbers, and at most 33,554,432"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            read(a, b)


def test_nan_is_refused_unless_the_signature_takes_it() -> None:
    value = np.array([[1.0, np.nan]], np.float32)
    spec = TensorSpec(name="x", shape=("batch", 2))
    with pytest.raises(InvalidRequestError, match=r"x is nan at index \[0, 1\]: it must be finite"):
        read_tensor(value, spec, "x")
    lenient = TensorSpec(name="x", shape=("batch", 2), finite=False)
    assert read_tensor(value, lenient, "x") is value
    with pytest.raises(UnprocessableError, match=r"output 'x' is nan at index \[0, 1\]"):
        written("x", value, "json")
    assert np.isnan(np.frombuffer(base64.b64decode(written("x", value, "base64")["data"]), np.float32)[1])


def test_lists_are_checked_before_numpy_sees_them() -> None:
    wide = TensorSpec(name="x", shape=("batch", 2), dtype="uint64")
    assert read_tensor([[2**64 - 1, 0]], wide, "x").tolist() == [[2**64 - 1, 0]]
    single = TensorSpec(name="x", shape=("batch", 2))
    assert read_tensor([[1, 2.5]], single, "x").tolist() == [[1, 2.5]]
    assert read_tensor([[1, 1e300]], TensorSpec(name="x", shape=("batch", 2), finite=False), "x")[0, 1] == np.inf
    for value, spec, message in (
        ([["a" * 1_000_000, *[0] * 1_000_000]], single, "holds strings"),
        ([[True, 1.0]], single, "holds booleans"),
        ([[1, [2]]], single, "something else than numbers"),
        ([[1, 2], 3], single, "ragged"),
        ([[10**400, 1]], single, "holds a number that no float32 holds"),
        ([[1, 2**64]], wide, r"is 18446744073709551616 at index \[0, 1\], which is no uint64"),
        ([[0, -1]], wide, r"is -1 at index \[0, 1\], which is no uint64"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            read_tensor(value, spec, "x")


def test_rows_go_in_pieces() -> None:
    arrays = {"a": np.zeros((1000, 8), np.float32), "b": np.zeros((1000, 8, 2), np.float32)}
    found = pieces(arrays, PAIR.inputs)
    assert [first for first, _ in found] == list(range(0, 1000, 128))
    assert sum(len(block["b"]) for _, block in found) == 1000


def test_safetensors_there_and_back() -> None:
    tensors = {"a": np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::2], "b": np.array([True, False])}
    found = parse_safetensors(dump_safetensors(tensors, {"note": "x"}))
    assert {name: array.tolist() for name, array in found.items()} == {"a": [[0, 2], [3, 5]], "b": [True, False]}
    data = bytearray(dump_safetensors({"b": np.array([True])}))
    data[-1] = 7
    shapes = (
        b'{"x":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}',
        (b'{"x":{"dtype":"F32","shape":[%s1],"data_offsets":[0,4]}}' % (b"1," * 99)),
    )
    odd = [len(header).to_bytes(8, "little") + header + b"\0" * 4 * place for place, header in enumerate(shapes)]
    for wrong, message in (
        (bytes(data), "other bytes than 0 and 1"),
        (b"", "sound"),
        (b"\xff" * 9, "sound"),
        (odd[0], "sound"),
        (odd[1], "sound"),
    ):
        with pytest.raises(TensorError, match=message):
            parse_safetensors(wrong)
