"""Which replica a request for a background response goes to."""

import orjson

from mlx_parallm.cluster.replicas import response_owners
from mlx_parallm.cluster.replicas.response_owners import ResponseOwners
from mlx_parallm.server.api import route_table

ROUTES = route_table()
CREATE = ROUTES.find("POST", "/v1/responses")


def answer(identity: str, background: bool = True) -> bytes:
    return orjson.dumps({"id": identity, "background": background, "status": "in_progress"})


def owner(owners: ResponseOwners, path: str) -> str | None:
    return owners.of(ROUTES.find("POST", path), path)


def test_requests_for_a_background_response_go_to_who_makes_it() -> None:
    owners = ResponseOwners()
    owners.note(CREATE, 200, answer("resp_1"), "left")
    owners.note(CREATE, 200, answer("resp_2"), "right")
    assert owner(owners, "/v1/responses/resp_1") == "left"
    assert owner(owners, "/v1/responses/resp_2/cancel") == "right"
    assert owner(owners, "/v1/responses/resp_3") is None
    assert owner(owners, "/v1/responses") is None
    assert owner(owners, "/v1/chat/completions") is None


def test_other_answers_are_not_noted() -> None:
    owners = ResponseOwners()
    owners.note(ROUTES.find("POST", "/v1/completions"), 200, answer("a"), "left")
    owners.note(CREATE, 429, answer("b"), "left")
    owners.note(CREATE, 200, answer("c", background=False), "left")
    owners.note(CREATE, 200, b"no JSON", "left")
    owners.note(CREATE, 200, b"[1]", "left")
    assert not owners._owners


def test_the_oldest_are_forgotten() -> None:
    owners = ResponseOwners()
    for number in range(response_owners.CAPACITY + 5):
        owners.note(CREATE, 200, answer(f"{number}"), "left")
    assert owner(owners, "/v1/responses/4") is None
    assert owner(owners, "/v1/responses/5") == "left"
