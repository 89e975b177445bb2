"""Where the user's files live. Called by `blas` and `models.gguf`, which keep converted copies there."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Our folder in the user's cache; it may not exist yet, and all in it can be made again."""
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or Path.home() / ".cache") / "mlx-parallm"
