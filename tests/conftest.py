"""Shared by all tests: the package comes first, so that MLX finds its BLAS, and no test touches the user's cache."""

import gc
from collections.abc import Iterator

import pytest

import mlx_parallm  # noqa: F401  before any test module imports MLX
from mlx_parallm.models.device import give_memory_back


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for the whole run: the embedded model is converted once. No test asks the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True, scope="module")
def memory_goes_back() -> Iterator[None]:
    """What a module's models and caches held does not stay for the rest of the run."""
    yield
    gc.collect()
    give_memory_back()
