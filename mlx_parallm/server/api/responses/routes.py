"""The endpoints of `/v1/responses`."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Annotated, Any

from fastapi import Path
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, NotFoundError, ParallmError, UnavailableError
from mlx_parallm.server.api.responses.background import BackgroundResponse
from mlx_parallm.server.api.responses.bodies import MAX_ITEMS, ResponseBody
from mlx_parallm.server.api.responses.input_items import PlacedItem, PromptMessage, prompt_messages, shortened
from mlx_parallm.server.api.responses.items import InputItem, InputMessage, ItemReference, read_item, stored_items
from mlx_parallm.server.api.responses.response_store import Item, ResponseStore, StoredResponse
from mlx_parallm.server.api.responses.response_types import (
    InputItemList,
    InputTokenCount,
    ResponseDeleted,
    ResponseFailure,
    ResponseObject,
)
from mlx_parallm.server.api.responses.writer import ResponsesWriter
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.generation.call import ChatTurn, GenerationCall, Structure
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.preparation import GenerationService
from mlx_parallm.server.generation.responses import respond
from mlx_parallm.server.http.http_errors import JSONResponse
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.text.grammar import json_grammar
from mlx_parallm.text.prompts import Conversation, check_template_kwargs

ROOM = 1024  # tokens that truncation leaves for a response of no said length, where the context is four times that
MAX_PAGE = 100
MAX_UNWRITTEN = 64  # responses that stay in memory, since the disk took them no more

ResponseId = Annotated[
    str, Path(description="The id of a stored response", examples=["resp_9b3c6f1d2e8a4f70b5c1d9e0a7f36482"])
]


class ResponseRoutes:
    def __init__(self, service: GenerationService, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._running: dict[str, BackgroundResponse] = {}
        self._unwritten: dict[tuple[str, str], StoredResponse] = {}

    async def create(self, body: ResponseBody, request: Request) -> HttpResponse:
        """Answers an input. With `stream`, events arrive as server-sent events; with `background`, the response is
        still in progress, and `GET /v1/responses/{response_id}` tells when it has ended."""
        owner = owner_of(request)
        items = await self._input(body, owner)
        generation = await self._prepare(body, await self._context(body, owner, items), request)
        stores = body.store and self._store.keeps

        writes: list[tuple[ResponseObject, Future[bool]]] = []

        def keep(response: ResponseObject) -> None:
            self._running.pop(response["id"], None)
            if stores:
                stored = StoredResponse(response, kept)
                writes.append((response, self._store.put(owner, stored)))
                if body.background:
                    writes[-1][1].add_done_callback(partial(self._keep_in_memory, owner, stored))

        async def written(error: ParallmError | None = None) -> None:
            """An id that a client has seen survives a crash of the server, or the response says `store: false`."""
            writer.finish(error)
            for response, write in writes:
                response["store"] = await asyncio.shield(asyncio.wrap_future(write))

        kept = stored_items(items)
        writer = ResponsesWriter(body, generation, keep, stores=stores)
        if not body.background:
            return await respond(generation, writer, request, written)
        if not stores:
            raise InvalidRequestError("background: this server keeps no responses", param="background")
        state = state_of(request.scope)
        release = [*state.held_models, current_caller.get().leave]
        running = BackgroundResponse(owner, generation, writer, release)
        started = writer.in_progress()
        if not await asyncio.wrap_future(self._store.put(owner, StoredResponse(started, kept))):
            raise UnavailableError("background: the response can't be stored, so nobody could ask for it: try later")
        try:
            generation.start(running)
        except ParallmError:
            await self._store.delete(owner, writer.id)
            raise
        state.held_models = []  # held until the response has ended
        state.runs_on = True  # and counted as a request of its key
        self._running[writer.id] = running
        return JSONResponse(started)

    def _keep_in_memory(self, owner: str, stored: StoredResponse, write: "Future[bool]") -> None:
        """One that ran in the background and could not be written when it had ended is still asked for."""
        if not write.result():
            self._unwritten[owner, stored.id] = StoredResponse({**stored.response, "store": False}, stored.input)
            while len(self._unwritten) > MAX_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]

    async def count(self, body: ResponseBody, request: Request) -> HttpResponse:
        """Returns how many tokens an input has, with its instructions, tools and all that it continues."""
        owner = owner_of(request)
        items = await self._input(body, owner)
        generation = await self._prepare(body, await self._context(body, owner, items), request)
        return JSONResponse(InputTokenCount(object="response.input_tokens", input_tokens=generation.prompt_tokens))

    async def retrieve(self, response_id: ResponseId, request: Request) -> HttpResponse:
        """A stored response, or one that runs in the background."""
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise InvalidRequestError("stream: a stored response can't be streamed", param="stream")
        return JSONResponse((await self._find(response_id, request)).response)

    async def delete(self, response_id: ResponseId, request: Request) -> HttpResponse:
        """Removes a stored response. Those that continue it can't be continued any more."""
        await self._find(response_id, request)
        if (running := self._running.get(response_id)) is not None:
            running.cancel()
        self._unwritten.pop((owner_of(request), response_id), None)
        await self._store.delete(owner_of(request), response_id)
        return JSONResponse(ResponseDeleted(id=response_id, object="response", deleted=True))

    async def cancel(self, response_id: ResponseId, request: Request) -> HttpResponse:
        """Ends a response that runs in the background. One that has ended stays as it is."""
        found = (await self._find(response_id, request)).response
        if not found["background"]:
            raise InvalidRequestError(
                "only responses created with background can be cancelled; a stream ends when its client disconnects",
                param="response_id",
            )
        if (running := self._running.get(response_id)) is not None:
            return JSONResponse(running.cancel())
        return JSONResponse((await self._find(response_id, request)).response)  # it may have ended just now

    async def input_items(
        self,
        response_id: ResponseId,
        request: Request,
        order: str = "desc",
        limit: str = "20",
        after: str | None = None,
    ) -> HttpResponse:
        """The items that a stored response was given as input, newest first; not those of responses before it."""
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order: expected asc or desc", param="order", code="invalid_value")
        if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_PAGE:
            raise InvalidRequestError(
                f"limit: expected a number between 1 and {MAX_PAGE}", param="limit", code="invalid_value"
            )
        items = list((await self._find(response_id, request)).input)
        items = items if order == "asc" else items[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise InvalidRequestError("after: there is no such item", param="after", code="invalid_value")
            items = items[places[0] + 1 :]
        page = items[: int(limit)]
        return JSONResponse(
            InputItemList(
                object="list",
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=len(items) > len(page),
            )
        )

    async def _find(self, response_id: str, request: Request) -> StoredResponse:
        runs = response_id in self._running  # looked up first: one that ends now is stored after this `get`
        if (unwritten := self._unwritten.get((owner_of(request), response_id))) is not None:
            return unwritten
        found = await self._store.get(owner_of(request), response_id)
        if found is None:
            raise NotFoundError(f"there is no response {response_id[:100]!r} here", param="response_id")
        if found.abandoned and not runs:
            message = "the server that computed it has stopped before its end"
            error = ResponseFailure(code="server_error", message=message)
            return StoredResponse({**found.response, "status": "failed", "error": error}, found.input)
        return found

    async def _input(self, body: ResponseBody, owner: str) -> list[InputItem]:
        """The items of a body, with those that it refers to."""
        if isinstance(body.input, str):
            return [InputMessage.model_validate({"role": "user", "content": body.input})]
        names = {item.id for item in body.input if isinstance(item, ItemReference)}
        stored = await self._store.items(owner, names) if names else {}
        return [
            _referred(item, stored, f"input.{number}") if isinstance(item, ItemReference) else item
            for number, item in enumerate(body.input)
        ]

    async def _context(self, body: ResponseBody, owner: str, items: Sequence[InputItem]) -> list[PromptMessage]:
        """The conversation, with all that the body continues."""
        before: list[Item] = []
        if body.previous_response_id is not None:
            if body.previous_response_id in self._running:
                raise InvalidRequestError(
                    "the previous response is still in progress: wait for its end, or cancel it",
                    param="previous_response_id",
                )
            before = await self._store.chain(owner, body.previous_response_id)
        if len(before) + len(items) > MAX_ITEMS:
            raise InvalidRequestError(
                f"the conversation has more than {MAX_ITEMS} items: begin a new one", param="previous_response_id"
            )
        placed = [PlacedItem(read_item(item), "previous_response_id") for item in before]
        placed += [PlacedItem(item, f"input.{number}") for number, item in enumerate(items)]
        messages = prompt_messages(placed, body.instructions)
        if not messages:
            raise InvalidRequestError("input: there is nothing to answer", param="input", code="invalid_value")
        return messages

    async def _prepare(self, body: ResponseBody, messages: Sequence[PromptMessage], request: Request) -> Generation:
        """Prepares a response; with `truncation: auto`, from as much of the conversation as fits."""
        try:
            return await self._prepared(body, messages, request)
        except ContextLengthError:
            cuts = shortened(messages)
            if body.truncation != "auto" or not len(cuts):
                raise
        fitting: Generation | None = None
        # the first cut that fits is between them
        low = 0
        high = len(cuts) - 1
        while low <= high:
            middle = (low + high) // 2
            try:
                found = await self._prepared(body, cuts[middle], request)
            except ContextLengthError:
                if middle == len(cuts) - 1 and fitting is None:
                    raise
                low = middle + 1
                continue
            context = found.served.context_length
            room = min(ROOM, context // 4)
            if context - found.prompt_tokens < room and middle < len(cuts) - 1:
                low = middle + 1
                fitting = fitting or found
            else:
                high = middle - 1
                fitting = found
        assert fitting is not None, "the shortest was tried"
        return fitting

    async def _prepared(self, body: ResponseBody, messages: Sequence[PromptMessage], request: Request) -> Generation:
        try:
            completion_id = f"resp_{uuid.uuid4().hex}"  # by chance: who knows it may not be guessed
            return await self._service.prepare(response_call(body, messages), request, completion_id)
        except InvalidRequestError as error:
            if error.param == "messages":  # as chat templates and their limits call it
                error.param = "input"
            raise


def _referred(reference: ItemReference, stored: Mapping[str, Item], param: str) -> InputItem:
    if reference.id not in stored:
        raise NotFoundError(f"{param}: there is no stored item {reference.id[:100]!r}", param=f"{param}.id")
    return read_item(stored[reference.id])


def owner_of(request: Request) -> str:
    """Whose stored responses a request may see: those of its key."""
    key = state_of(request.scope).caller.key
    return "" if key is None else key.identity


def response_call(body: ResponseBody, messages: Sequence[PromptMessage]) -> GenerationCall:
    check_template_kwargs(body.chat_template_kwargs)
    use = body.tool_use
    sampling = body.sampling_params(
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    turn = ChatTurn(
        conversation=Conversation(
            messages=[entry.message for entry in messages],
            tools=[tool.definition for tool in use.tools],
            template_kwargs=body.template_kwargs,
        ),
        must_call=use.must_call,
        tool_name=None if use.named is None else use.named.function,
        parallel_calls=body.parallel_tool_calls,
        images=[image for entry in messages for image in entry.images],
    )
    return GenerationCall(
        chat=turn,
        sampling=sampling,
        structure=_structure(body),
        model=body.model,
        lora_adapter=body.lora_adapter,
        max_tokens_field="max_output_tokens",
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt or "",
    )


def _structure(body: ResponseBody) -> Structure | None:
    shape = body.text.format if body.text is not None else None
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return Structure(json_grammar({"type": "object"}), "text.format")
    schema: dict[str, Any] = shape.schema_ or {}
    return Structure(json_grammar(schema), "text.format.schema")
