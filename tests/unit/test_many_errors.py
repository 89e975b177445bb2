"""A body that is wrong in thousands of places is refused at the first few: no million errors are collected."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mlx_parallm.server import api
from mlx_parallm.server.http import http_errors as errors
from mlx_parallm.server.http.schema import MAX_NAMES, Body

MANY = 3000
WRONG: dict[str, Any] = {
    "texts": ["a"] * MANY,
    "objects": [{}] * MANY,
    "nulls": [None] * MANY,
    "fractions": [1.5] * MANY,
    "texts in a list": [["a"] * MANY],
    "fractions in a list": [[1.5] * MANY],
    "objects in a list": [[{}] * MANY],
    "texts in lists": [[["a"] * MANY]],
    "texts by name": {str(number): "a" for number in range(MAX_NAMES + 1)},
    "objects by name": {str(number): {"a": []} for number in range(MAX_NAMES + 1)},
}


def bodies(kind: type[Body] = Body) -> Iterator[type[Body]]:
    for one in kind.__subclasses__():
        yield one
        yield from bodies(one)


def test_no_list_and_no_object_gives_many_errors() -> None:
    for module in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        importlib.import_module(module.name)
    found, many = set(bodies()), []
    assert len(found) > 50
    for body in found:
        adapter = TypeAdapter(body)
        for field in body.model_fields:
            for kind, value in WRONG.items():
                try:
                    adapter.validate_python({field: value})
                except ValidationError as error:
                    if error.error_count() > 200:
                        many.append(f"{body.__name__}.{field}, {kind}: {error.error_count()}")
    assert not many


def test_few_errors_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    path_of = errors._path

    def count(error: Any, body: Any) -> Any:
        nonlocal looked
        looked += 1
        return path_of(error, body)

    monkeypatch.setattr(errors, "_path", count)
    body = {"prompts": ["a"] * 100_000}
    kinds = [("body", "prompts", "list[int]", number) for number in range(100_000)]
    found = [{"type": "int_type", "loc": loc, "msg": "should be an integer", "input": "a"} for loc in kinds]
    answer = errors.validation_error(found, body)
    assert answer.param == "prompts.0"
    assert looked <= errors.LOOKED_AT
