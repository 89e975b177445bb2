"""Shapes of batches of texts. New shapes cost time on a GPU, so that batches are padded to a few of them there."""

from collections.abc import Iterator

from mlx_parallm.devices.device import this_device

LENGTH_STEP = 16


def padded_shape(rows: int, longest: int, max_length: int) -> tuple[int, int]:
    """Rows and length of a batch. CUDA keeps a graph per shape, and takes tens of milliseconds to make one: there the
    number of rows is a power of two."""
    device = this_device()
    if not device.builds_kernels:
        return rows, longest
    length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, max_length)
    return 1 << (rows - 1).bit_length() if device.plans_shapes else rows, length


def warm_up_shapes(max_length: int) -> Iterator[tuple[int, int]]:
    """Rows and lengths of batches that compile the kernels of a text model; none where nothing is compiled."""
    if this_device().builds_kernels:
        yield from ((rows, min(length, max_length)) for length in (16, 64, 256) for rows in (1, 16, 64))
