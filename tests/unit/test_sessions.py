"""State that the server keeps for policies: by model and session, for a while, and not too much of it."""

import numpy as np
import pytest

from mlx_parallm.errors import ConflictError
from mlx_parallm.server.sessions import HiddenStateStore
from mlx_parallm.tensors import Array


def state(value: float) -> dict[str, Array]:
    return {"h": np.full((1, 4), value, np.float32)}


def write(store: HiddenStateStore, model: str, session: str, value: float) -> None:
    store.take(model, [session])
    store.put(model, {session: state(value)})
    store.release(model, [session])


def read(store: HiddenStateStore, model: str, session: str) -> float | None:
    [found] = store.take(model, [session])
    store.release(model, [session])
    return None if found is None else float(found["h"][0, 0])


def test_a_session_is_of_one_model() -> None:
    store = HiddenStateStore()
    write(store, "a", "s", 1)
    assert read(store, "a", "s") == 1
    assert read(store, "b", "s") is None
    write(store, "a", "s", 2)
    assert (read(store, "a", "s"), len(store)) == (2, 1)


def test_one_request_at_a_time() -> None:
    store = HiddenStateStore()
    store.take("a", ["s", "t"])
    with pytest.raises(ConflictError, match="another request of session 't' is running") as caught:
        store.take("a", ["u", "t"])
    assert (caught.value.status, caught.value.code) == (409, "session_busy")
    store.take("b", ["t"])
    store.take("a", ["u"])  # what was refused holds nothing
    store.release("a", ["s", "t"])
    store.take("a", ["t"])


def test_an_unused_session_goes() -> None:
    now = [0.0]
    store = HiddenStateStore(seconds=10, clock=lambda: now[0])
    write(store, "a", "old", 1)
    now[0] = 9
    write(store, "a", "new", 2)
    assert read(store, "a", "old") == 1
    now[0] = 11
    assert read(store, "a", "old") is None
    assert read(store, "a", "new") == 2


def test_the_least_recently_used_go() -> None:
    store = HiddenStateStore(most=2)
    for session in "abac":
        write(store, "m", session, 1)
    assert [read(store, "m", session) for session in "abc"] == [1, None, 1]
    small = HiddenStateStore(most_bytes=40)
    for session in "abc":
        write(small, "m", session, 1)
    assert [read(small, "m", session) for session in "abc"] == [None, 1, 1]
    assert len(small) == 2
