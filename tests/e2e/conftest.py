"""Real processes for the end-to-end tests: a tiny random model in a folder, and servers that run for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import ServerProcess, ours, running
from tests.tiny import save_tiny, tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of random weights, as a folder that the loader reads."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    save_tiny(tiny("llama"), folder)
    return folder


@pytest.fixture(scope="package")
def tiny_server(tiny_folder: Path) -> Iterator[ServerProcess]:
    """A server of the tiny model, for tests that need speed and not sense."""
    with running(ours(str(tiny_folder))) as server:
        yield server


@pytest.fixture(scope="package")
def embedded_server(own_cache: None) -> Iterator[ServerProcess]:
    """A server of the embedded model, for tests that need an answer that makes sense."""
    with running(ours(None)) as server:
        yield server
