"""The served models, each with its text tools. `app` makes the table of them, routes look them up."""

import asyncio
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from mlx_parallm import __version__
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError
from mlx_parallm.runtime.client import AdapterTable, ModelClient, RuntimeClient
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.load_on_request import acquire
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.text.parsers.chat_parser import Thinking
from mlx_parallm.text.parsers.tool_format import ToolFormat
from mlx_parallm.text.prompts import Prompts
from mlx_parallm.types import UNKNOWN, AdapterVersion, ModelInfo, ModelStatus

DEFAULT = "default"
GENERATING = ("chat", "vision")  # kinds of models that generate text
BASE = "base"  # as an adapter: none


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model, and what it takes to turn its tokens into text and back."""

    name: str
    client: ModelClient
    created: int = field(default_factory=lambda: int(time.time()))
    vocabulary: Vocabulary = field(init=False)
    prompts: Prompts = field(init=False)
    tool_format: ToolFormat = field(init=False)
    thinking: Thinking | None = field(init=False)
    marks: frozenset[int] = field(init=False)  # special tokens that carry meaning in a chat's text
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.prompts = Prompts(tokenizer)
        self.tool_format = ToolFormat.of(tokenizer)
        self.thinking = Thinking.of(tokenizer)
        self.marks = self._mark_tokens()
        identity = f"{__version__} {self.model.source} {self.model.precision}"
        self.fingerprint = f"fp_{hashlib.blake2b(identity.encode(), digest_size=5).hexdigest()}"

    @property
    def model(self) -> ModelInfo:
        return self.client.model

    @property
    def tokenizer(self) -> Any:
        return self.client.tokenizer

    @property
    def adapters(self) -> AdapterTable:
        return self.client.adapters

    @property
    def context_length(self) -> int:
        return self.model.context_length

    def first_tokens(self) -> list[int]:
        """What an empty text begins with: a model can't continue nothing at all."""
        token = self.tokenizer.bos_token_id
        if token is None:
            raise InvalidRequestError("the prompt is empty, and this model has no token to begin with", param="prompt")
        return [token]

    def _mark_tokens(self) -> frozenset[int]:
        marks = [*self.tool_format.marks, *self.tokenizer.structural_markers]
        if self.thinking is not None:
            marks += [self.thinking.start, self.thinking.end]
        tokens = {token for mark in marks for token in self.tokenizer.encode(mark, add_special_tokens=False)}
        return self.vocabulary.special & tokens


class ModelTable:
    """Served models by name; `default` is the first. Those that are not loaded come with `use`.

    Where a request names one, only those are there that its key may use; who goes through all of them gets all.
    """

    def __init__(self, runtime: RuntimeClient, timeout: float | None = None) -> None:
        self._runtime = runtime
        self._timeout = timeout  # seconds for which a request waits for a model
        self._served: dict[str, ServedModel] = {}
        runtime.pool.listen(self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        """Makes the tools of models that are new, and lets go of those that have gone."""
        known = self._served
        clients = self._runtime.models
        if [served.client for served in known.values()] != list(clients.values()):
            self._served = {
                name: known[name] if name in known and known[name].client is client else ServedModel(name, client)
                for name, client in clients.items()
            }

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    @property
    def default(self) -> ServedModel:
        """The first of all, which is the one that is trained."""
        for served in self:
            if current_caller.get().may_use_model(served.name):
                return served
            break
        raise ModelNotFoundError("no model that generates text is loaded here", param="model")

    def visible(self) -> dict[str, ServedModel]:
        """Those that the request's key may use."""
        caller = current_caller.get()
        return {name: served for name, served in self._served.items() if caller.may_use_model(name)}

    def visible_statuses(self) -> dict[str, ModelStatus]:
        """The same, those that are not loaded too, of all kinds."""
        caller = current_caller.get()
        return {one.name: one for one in self._runtime.pool.statuses() if caller.may_use_model(one.name)}

    async def use(self, name: str, request: Request) -> None:
        """Holds the model of this name, or of the adapter of this name, until the request is answered.

        One that is not loaded is loaded now, and the request waits for it.
        """
        own = self._name_of(name)
        hold = await acquire(self._runtime.pool, own, request, self._timeout)
        state_of(request.scope).held_models.append(partial(self._runtime.pool.release, hold))
        if own not in self.visible():  # its kind is certain now
            self._check_generates(own, self.visible_statuses())

    def _name_of(self, name: str) -> str:
        """A model's own name: of `default`, of an adapter, or of a model that is not loaded."""
        served = self.visible()
        if name in served:
            return name
        statuses = self.visible_statuses()
        if name in statuses:
            if statuses[name].kind != UNKNOWN:
                self._check_generates(name, statuses)
            return name
        if name == DEFAULT:
            names = [*served, *(one.name for one in statuses.values() if one.kind in GENERATING)]
            return names[0] if names else self.default.name
        return self.find(name).name

    def _check_generates(self, name: str, statuses: Mapping[str, ModelStatus]) -> None:
        if statuses[name].kind not in GENERATING:
            raise InvalidRequestError(
                f"{name!r} is a model of the kind {statuses[name].kind}, which generates no text", param="model"
            )

    async def checkpoint(self, label: str) -> str | None:
        """The adapter, as name@version, that a label means which names a checkpoint of training; None for any other.
        It is loaded first where it has to be."""
        name, at, _ = label.partition("@")
        served = next(iter(self), None)
        if served is None or at or name in (DEFAULT, BASE) or not self._runtime.training.adapters:
            return None
        if name in self._served or any(name in one.adapters for one in self):
            return None
        may_use = current_caller.get().may_use_adapter
        version = await asyncio.to_thread(self._runtime.adapters.checkpoint, served.name, name, may_use)
        return None if version is None else version.label

    def find(self, name: str) -> ServedModel:
        served = self.visible()
        if name in served:
            return served[name]
        if name == DEFAULT:
            return next(iter(served.values()), None) or self.default
        for one in served.values():
            if name in adapter_names(one.adapters):
                return one
        known = [*served, *(name for one in served.values() for name in adapter_names(one.adapters)), DEFAULT]
        known = list(dict.fromkeys([*known, *self.visible_statuses()]))
        raise ModelNotFoundError(f"there is no model {name!r} here; there is {', '.join(known)}", param="model")

    def with_adapter(self, name: str) -> ServedModel:
        for served in self.visible().values():
            if name in adapter_names(served.adapters):
                return served
        raise ModelNotFoundError(f"there is no adapter {name!r} here", param="name")

    def check_free(self, name: str) -> None:
        """A model's name can't be an adapter's, and a key may be bound to some names."""
        current_caller.get().check_changes_adapter(name)
        names = {status.name for status in self._runtime.pool.statuses()}
        if name in names or name in (DEFAULT, BASE):
            raise InvalidRequestError(f"{name!r} is the name of a model", param="name")

    def version_of(self, model: str, lora_adapter: str | None) -> tuple[ServedModel, AdapterVersion | None]:
        """The model that a request asks for, and the adapter: by `model`, or by `lora_adapter` as name[@version]."""
        served = self.find(model)
        return served, self._version(served, model, lora_adapter)

    def _version(self, served: ServedModel, model: str, lora_adapter: str | None) -> AdapterVersion | None:
        registry = served.adapters
        if lora_adapter is None and (model in self._served or model == DEFAULT):
            self._check_routes(served)
            return registry.route()
        if lora_adapter is None:
            return registry.find(model)
        name, number = parse_label(lora_adapter, "lora_adapter")
        if name == BASE:
            return None
        if name not in adapter_names(registry):
            raise ModelNotFoundError(f"{served.name} has no adapter {name!r}", param="lora_adapter")
        return registry.find(name, number)

    def _check_routes(self, served: ServedModel) -> None:
        """A key that is bound to adapters gets no other by the model's own name either."""
        caller = current_caller.get()
        names = {route.name for route in served.adapters.routes if route.name is not None}
        if not all(caller.may_use_adapter(name) for name in names):
            raise ModelNotFoundError(
                f"{served.name} serves an adapter now that this key may not use: ask for one of its own, or send "
                "lora_adapter 'base' for the model alone",
                param="model",
            )


def adapter_names(registry: AdapterTable) -> list[str]:
    """Returns the names of the adapters that the request's key may use."""
    caller = current_caller.get()
    return [name for name in registry.names if caller.may_use_adapter(name)]


def parse_label(label: str, param: str) -> tuple[str, int | None]:
    """name[@version]"""
    name, at, number = label.partition("@")
    if at and not is_number(number):
        raise InvalidRequestError(f"a version is a number, not {number[:40]!r}", param=param)
    return name, int(number) if number else None


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19
