"""`mx.fast.metal_kernel` without Metal: the same text, compiled as C++ and run over NumPy's copies of the arrays.

`ShimKernel` takes what `mx.fast.metal_kernel` takes, and is called in the same way. Inputs are handed over in copies
that must not change. What it returns is computed when it is called, so it can't be traced.
"""

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.host import numpy_view, to_numpy

HEADERS = Path(__file__).parent
TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.int32: "int", mx.uint32: "uint"}
STORED = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16, mx.int32: np.int32}
PLACES = {  # what Metal tells a thread
    "threadgroup_position_in_grid": "shim::group_place",
    "thread_position_in_grid": "shim::place_in_grid()",
    "thread_position_in_threadgroup": "shim::place_in_group()",
    "threads_per_grid": "shim::grid",
    "threadgroups_per_grid": "shim::groups",
    "thread_index_in_threadgroup": "shim::current",
    "thread_index_in_simdgroup": "(shim::current % 32)",
    "simdgroup_index_in_threadgroup": "(shim::current / 32)",
}
MOST_BUFFERS = 31
MOST_THREADS = 1024
SHIMS = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HEADERS.glob("*_shim.h")))).hexdigest()[:12]
FOLDER = Path(tempfile.gettempdir()) / f"mlx-parallm-shim-{SHIMS}"


class ShimError(Exception):
    """What a GPU would not survive, or not show."""


class ShimKernel:
    places: Mapping[str, str] = PLACES
    header = HEADERS / "metal_shim.h"
    most_buffers = MOST_BUFFERS
    in_place: frozenset[str] = frozenset()  # inputs that may be written to

    def __init__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
    ) -> None:
        self.name = name
        self._inputs = list(input_names)
        self._outputs = list(output_names)
        self._source = source
        self._header = header
        self._functions: dict[Any, Any] = {}
        self._shaped = [name for name in self._inputs if re.search(rf"\b{name}_shape\b", source)]
        assert not re.search(r"_strides\b|_ndim\b", source), "the shim has shapes alone"
        buffers = len(self._inputs) + len(self._shaped) + len(self._outputs)
        assert buffers <= self.most_buffers, f"{name} has {buffers} buffers"
        self.seed = 1

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        assert len(inputs) == len(self._inputs)
        assert len(output_shapes) == len(self._outputs)
        assert np.prod(threadgroup) <= MOST_THREADS
        types = [array.dtype for array in inputs]
        key = (tuple(types), tuple(output_dtypes), tuple(template))
        if key not in self._functions:
            self._functions[key] = self._compiled(types, output_dtypes, template)
        given = [_stored(array) for array in inputs]
        kept = [array.copy() for array in given]
        found = [
            np.full(shape, 0xFF, np.uint8).repeat(np.dtype(STORED[dtype]).itemsize, axis=-1).view(STORED[dtype])
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = [array.ctypes.data for array in (*given, *found)]
        shapes = [np.array(array.shape, np.int32) for array in given]
        self.seed = self.seed * 1664525 + 1013904223 & 0xFFFFFFFF
        met = self._functions[key](
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_void_p * len(shapes))(*(shape.ctypes.data for shape in shapes)),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*threadgroup),
            ctypes.c_uint(self.seed),
        )
        if not met:
            raise ShimError(f"{self.name}: threads wait where others never come")
        for name, array, copy in zip(self._inputs, given, kept, strict=True):
            if name not in self.in_place and array.tobytes() != copy.tobytes():
                raise ShimError(f"{self.name} writes to its input {name}")
        for name, array, copy in zip(self._inputs, inputs, given, strict=True):
            if name in self.in_place:
                _write_back(array, copy)
        return [_restored(array, dtype) for array, dtype in zip(found, output_dtypes, strict=True)]

    def _compiled(
        self, types: Sequence[mx.Dtype], output_types: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> Any:
        text = self._text(types, output_types, template)
        FOLDER.mkdir(exist_ok=True)
        stem = FOLDER / hashlib.sha256(text.encode()).hexdigest()[:24]
        library = stem.with_suffix(".so")
        if not library.exists():
            source = stem.with_suffix(".cpp")
            source.write_text(text)
            with tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".so", delete=False) as half_done:
                command = ["g++", "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{HEADERS}"]
                done = subprocess.run(
                    [*command, str(source), "-o", half_done.name], capture_output=True, text=True, check=False
                )
            assert done.returncode == 0, done.stderr[:4000]
            Path(half_done.name).replace(library)
        function = ctypes.CDLL(str(library)).launch
        function.restype = ctypes.c_bool
        return function

    def _in_cpp(self, text: str) -> str:
        """What threadgroups share becomes static, and pointers to it plain ones."""
        declared = re.sub(r"^(\s*)threadgroup\b(?=[^;()]*\[)", r"\1static", text, flags=re.MULTILINE)
        return re.sub(r"\bthreadgroup\s+(?=\w+\s*\*)", "", declared)

    def _text(
        self, types: Sequence[mx.Dtype], output_types: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]]
    ) -> str:
        lines = [f'#include "{self.header.name}"', *(f"#define {name} {value}" for name, value in self.places.items())]
        lines += [self._in_cpp(self._header), "static void** buffers;", "static int** shapes;"]
        kinds = ", ".join(f"{_kind_of(value)} {name}" for name, value in template)
        lines += [f"template <{kinds}>" if template else "", "void function() {"]
        for i, (name, dtype) in enumerate(zip(self._inputs, types, strict=True)):
            lines.append(f"const {TYPES[dtype]}* {name} = static_cast<const {TYPES[dtype]}*>(buffers[{i}]);")
            if name in self._shaped:
                lines.append(f"const int* {name}_shape = shapes[{i}];")
        for i, (name, dtype) in enumerate(zip(self._outputs, output_types, strict=True), len(types)):
            lines.append(f"{TYPES[dtype]}* {name} = static_cast<{TYPES[dtype]}*>(buffers[{i}]);")
        values = ", ".join(TYPES[value] if isinstance(value, mx.Dtype) else str(int(value)) for _, value in template)
        lines += [self._in_cpp(self._source), "}"]
        lines.append(
            'extern "C" bool launch(void** arrays, int** sizes, const uint* grid, const uint* threads, uint seed) {'
            f" buffers = arrays; shapes = sizes; return shim::run(function<{values}>, grid, threads, seed); }}"
        )
        return "\n".join(lines)


def _kind_of(value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _stored(array: mx.array) -> Any:
    """A contiguous copy."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(to_numpy(bits), STORED[array.dtype], order="C", copy=True)


def _write_back(array: mx.array, changed: Any) -> None:
    """Into the array's own memory, which MLX does not align as a GPU's is."""
    view = numpy_view(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
    assert view.flags.writeable
    view[...] = changed


def _restored(array: Any, dtype: mx.Dtype) -> mx.array:
    found = mx.array(array)
    return found.view(dtype) if dtype == mx.bfloat16 else found
