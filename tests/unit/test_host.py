"""What is read from the device is what was computed, or an error."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_parallm
from mlx_parallm.host import numpy_view, to_numpy

PACKAGE = Path(mlx_parallm.__file__).parent


@pytest.mark.parametrize("read", [to_numpy, numpy_view])
@pytest.mark.parametrize("started", [True, False])
def test_a_computation_that_failed_raises(read: Callable[[mx.array], object], started: bool) -> None:
    def compute() -> None:
        wrong = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu) + 1
        if started:
            mx.async_eval(wrong)
        read(wrong)

    with pytest.raises(RuntimeError, match="LU factorization"):
        compute()
    assert to_numpy(mx.ones((2,)) + 1).tolist() == [2.0, 2.0]


def test_a_view_is_no_copy() -> None:
    array = mx.zeros((3,))
    view = numpy_view(array)
    assert not view.flags.owndata
    assert np.shares_memory(view, numpy_view(array))
    copied = to_numpy(array)
    assert not np.shares_memory(copied, view)
    copied[0] = 1.0
    assert array.tolist() == [0.0, 0.0, 0.0]


def conversions(source: str) -> Iterator[ast.Call]:
    """Calls of np.array(x) and np.asarray(x), which of an MLX array swallow errors. With a type, or of a literal, they
    make arrays of Python's numbers."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("array", "asarray", "copyto", "from_dlpack")
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("np", "numpy")
            and len(node.args) == 1
            and not node.keywords
            and not isinstance(node.args[0], ast.List | ast.ListComp)
        ):
            yield node


def test_nothing_else_reads_device_arrays() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "host.py" and "mlx.core" in path.read_text()
        for call in conversions(path.read_text())
    ]
    assert found == []
    assert len(list(conversions("np.array(x); np.asarray(y); np.array([1]); np.array(z, np.int32)"))) == 2


def test_types_survive() -> None:
    assert to_numpy(mx.array([1, 2], mx.int32)).dtype == np.int32
