"""Shared by all tests: the package comes first, so that MLX finds its BLAS, and no test touches the user's cache."""

from collections.abc import Iterator

import pytest

import mlx_parallm  # noqa: F401  before any test module imports MLX


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for the whole run: the embedded model is converted once. No test asks the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
