"""The one way from an MLX array to host memory. Every module that reads device results calls it.

NumPy's own conversion does not raise when the computation behind an array has failed: it returns a buffer that nobody
has written, and the error is lost. `mx.eval` raises, but only once per failure: whoever catches that error must throw
away everything that was computed in the meantime.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt


def to_numpy(array: mx.array) -> npt.NDArray[Any]:
    """A copy on the host; raises the error of a computation that has failed."""
    mx.eval(array)
    return np.array(array)


def numpy_view(array: mx.array) -> npt.NDArray[Any]:
    """The array's own memory where the host can address it, not a copy; raises as `to_numpy` does."""
    mx.eval(array)
    return np.asarray(array)
