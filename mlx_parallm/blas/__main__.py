"""`python -m mlx_parallm.blas`: prints the library, for `LD_PRELOAD=$(…) mlx_lm.server`."""

import sys

from mlx_parallm.blas import preload

path = preload()
if path is None:
    sys.exit("MLX uses its own BLAS here")
print(path)
