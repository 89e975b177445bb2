"""Where the user's files live. Called by `blas` and `models.gguf`, which keep converted copies there."""

import os
import platform
from pathlib import Path


def user_cache() -> Path:
    """Our folder in the user's cache; it may not exist yet, and all in it can be made again."""
    usual = Path.home() / ("Library/Caches" if platform.system() == "Darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "mlx-parallm"
