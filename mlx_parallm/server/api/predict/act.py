"""`/v1/rl/act`: actions of a policy for a batch of observations, with its recurrent state on either side."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import InvalidRequestError, NotFoundError
from mlx_parallm.policy_spans import as_lists, spans_between
from mlx_parallm.server.api.predict.bodies import ActBody, Acted
from mlx_parallm.server.api.predict.predict import json_of, off_loop, query
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.http.http_errors import validated
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.server.sessions import HiddenStateStore, SessionState
from mlx_parallm.server.tensor_bodies import (
    is_safetensors,
    join,
    parse_body,
    pieces,
    read_tensors,
    respond,
    wants_safetensors,
    written,
)
from mlx_parallm.signature import ActInput, ActOutput, PolicyInfo, TensorSpec
from mlx_parallm.tensors import Array

FIELDS = ("observations", "hidden_states", "episode_starts")  # tensors of a safetensors body, also as FIELD.NAME
FLAGS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(slots=True)
class ActCall:
    """A request whose tensors have been read and checked."""

    observations: dict[str, Array]
    states: dict[str, Array] | None  # None: zeros, or a session's
    starts: Array | None  # (rows,) of booleans
    sessions: list[str]
    rows: int


class ActRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._predictors = context.predictors
        self._sessions = HiddenStateStore()

    async def act(self, request: Request) -> Response:
        """Actions with their log-probabilities and, where the policy has them, value estimates and its new state. State
        is carried by the client (`hidden_states`) or kept here, for an hour after its last use (`session_id`, or
        `session_ids` for each row); two requests of one session at once are a 409. As a body of `Content-Type:
        application/x-safetensors` the tensors are `observations`, `hidden_states.NAME` and `episode_starts`, the other
        fields are in the query; `Accept` chooses the format of the response."""
        body = await self._body(request)
        async with self._predictors.use(body.model_id, "policy", request=request, param="model_id") as model:
            info = model.info
            assert isinstance(info, PolicyInfo)
            call = await off_loop(request, lambda _: read_call(body, info))
            if not call.sessions or not info.states:
                states = call.states if call.states is not None else zeros(info, call.rows)
                results = await self._run(model, request, body, call, states)
                new: list[str] | None = None
            else:
                results, new = await self._in_sessions(model, request, body, call)
        return await _respond(request, body, model.name, results, new)

    async def _body(self, request: Request) -> ActBody:
        if not is_safetensors(request):
            return validated(ActBody, await json_of(request))
        fields = query(request, "model_id", "model", "session_id", "deterministic", "seed", "encoding")
        if re.fullmatch(r"-?[0-9]{1,20}", fields.get("seed", "")):
            fields["seed"] = int(fields["seed"])
        fields["deterministic"] = FLAGS.get(given := fields.get("deterministic", "false"), given)
        if several := request.query_params.getlist("session_ids"):
            fields["session_ids"] = several
        return validated(ActBody, fields | grouped(await off_loop(request, parse_body)))

    async def _in_sessions(
        self, model: ServedPredictor, request: Request, body: ActBody, call: ActCall
    ) -> tuple[list[ActOutput], list[str]]:
        own = current_caller.get().own_name(f"{model.name} at {model.info.source}")  # another may have the name later
        kept = self._sessions.take(own, call.sessions)
        try:
            states, new = restored(model.info, call, kept)
            results = await self._run(model, request, body, call, states)
            ends = {name: join([result.states[name] for result in results]) for name in results[0].states}
            if len(call.sessions) == 1:
                after = {call.sessions[0]: {name: array.copy() for name, array in ends.items()}}
            else:
                after = {
                    session: {name: array[row : row + 1].copy() for name, array in ends.items()}
                    for row, session in enumerate(call.sessions)
                }
            self._sessions.put(own, after)
        finally:
            self._sessions.release(own, call.sessions)
        return results, new

    async def _run(
        self, model: ServedPredictor, request: Request, body: ActBody, call: ActCall, states: Mapping[str, Array]
    ) -> list[ActOutput]:
        inputs = dict(call.observations)
        for name, array in states.items():
            if call.starts is not None and call.starts.any():
                array = np.where(call.starts.reshape(-1, *(1,) * (array.ndim - 1)), np.zeros((), array.dtype), array)
            inputs[name] = array
        seed = secrets.randbits(63) if body.seed is None else body.seed
        info = model.info
        assert isinstance(info, PolicyInfo)
        items = [
            ActInput(inputs=block, seed=seed, first=first, deterministic=body.deterministic)
            for first, block in pieces(inputs, info.tensors.inputs)
        ]
        return await model.predict(items, request)


def grouped(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The tensors of a body by field: `hidden_states.h` is h of hidden_states."""
    found: dict[str, Any] = {}
    for name, array in tensors.items():
        field, dot, inner = name.partition(".")
        if field not in FIELDS:
            raise InvalidRequestError(
                f"tensor {name!r:.100} is unknown; there is {', '.join(FIELDS)}, and FIELD.NAME", param=name
            )
        if not dot:
            found[field] = array
        elif isinstance(found.setdefault(field, {}), dict):
            found[field][inner] = array
    return found


def read_call(body: ActBody, info: PolicyInfo) -> ActCall:
    """The body's tensors, checked against the policy."""
    specs = {spec.name: spec for spec in info.tensors.inputs}
    observed = [specs[name] for name in info.observations]
    signature = info.tensors
    observations = read_tensors(by_name(body.observations, observed), signature, observed, "observations")
    rows = len(observations[observed[0].name])
    kept = [specs[name] for name in info.states]
    states = None
    if body.hidden_states is not None:
        if not kept:
            raise InvalidRequestError("this policy has no state, so it takes no hidden_states", param="hidden_states")
        states = read_tensors(by_name(body.hidden_states, kept), signature, kept, "hidden_states")
        if (given := len(states[kept[0].name])) != rows:
            raise InvalidRequestError(
                f"hidden_states has {given} rows, and observations has {rows}", param="hidden_states"
            )
    sessions = [body.session_id] if body.session_id is not None else body.session_ids or []
    if body.session_ids is not None:
        _check_sessions(sessions, rows)
    return ActCall(observations, states, _starts(body.episode_starts, rows), sessions, rows)


def by_name(value: Any, specs: Sequence[TensorSpec]) -> Mapping[str, Any]:
    """Returns tensors by name; where there is only one, it may come without its name."""
    if isinstance(value, dict) and not ("data" in value and "shape" in value):
        return value
    if len(specs) == 1:
        return {specs[0].name: value}
    names = ", ".join(spec.name for spec in specs)
    raise InvalidRequestError(f"this policy has several of these, so give them by name: {names}", param="observations")


def _check_sessions(sessions: Sequence[str], rows: int) -> None:
    if len(sessions) != rows:
        raise InvalidRequestError(f"session_ids has {len(sessions)} names for {rows} rows", param="session_ids")
    if len(set(sessions)) != len(sessions):
        raise InvalidRequestError("session_ids has a name twice", param="session_ids")
    if any(not session or len(session) > 256 for session in sessions):
        raise InvalidRequestError("a session's name has 1 to 256 characters", param="session_ids")


def _starts(value: Any, rows: int) -> Array | None:
    if value is None:
        return None
    array = value if isinstance(value, np.ndarray) else None
    if isinstance(value, list) and all(isinstance(one, bool) for one in value):
        array = np.array(value, bool)
    if array is None or array.dtype != bool or array.shape != (rows,):
        raise InvalidRequestError(
            f"episode_starts must have a boolean for each of the {rows} rows", param="episode_starts"
        )
    return array


def zeros(info: PolicyInfo, rows: int) -> dict[str, Array]:
    specs = {spec.name: spec for spec in info.tensors.inputs}
    return {
        name: np.zeros((rows, *(int(dim or 0) for dim in specs[name].shape[1:])), specs[name].dtype)
        for name in info.states
    }


def _fits(state: SessionState, states: Mapping[str, Array]) -> bool:
    shapes = {name: array.shape[1:] for name, array in states.items()}
    return {name: array.shape[1:] for name, array in state.items()} == shapes


def restored(info: Any, call: ActCall, kept: Sequence[SessionState | None]) -> tuple[dict[str, Array], list[str]]:
    """The state of every row, and which sessions are new. Who says that an episode goes on must not get a new one."""
    states = zeros(info, call.rows)
    new = []
    each = call.rows if len(call.sessions) == 1 else 1
    for place, (session, state) in enumerate(zip(call.sessions, kept, strict=True)):
        own = slice(place * each, (place + 1) * each)
        if state is None or not _fits(state, states):
            new.append(session)
            if call.starts is not None and not call.starts[own].all():
                raise NotFoundError(
                    f"session {session!r:.100} is unknown, or has been given up after an hour without use, and "
                    "episode_starts says that it goes on: begin a new episode",
                    param="session_id",
                    code="session_not_found",
                )
            continue
        rows = len(next(iter(state.values())))
        if rows != each:
            raise InvalidRequestError(
                f"session {session!r:.100} has {rows} rows, and this request {each}: use another session_id",
                param="session_id",
            )
        for name, array in state.items():
            states[name][own] = array
    return states, new


def spans(results: Sequence[ActOutput]) -> list[list[int]]:
    """[first row, end, version], of rows that one version acted for."""
    starts: list[tuple[int, int]] = []
    at = 0
    for result in results:
        if not starts or starts[-1][1] != result.version:
            starts.append((at, result.version))
        at += len(result.log_probs)
    return as_lists(spans_between(starts, at))


async def _respond(
    request: Request, body: ActBody, name: str, results: Sequence[ActOutput], new: list[str] | None
) -> Response:
    tensors = {
        "actions": join([result.actions for result in results]),
        "action_log_probs": join([result.log_probs for result in results]),
    }
    if results[0].values is not None:
        tensors["value_estimates"] = join([result.values for result in results if result.values is not None])
    states = {} if new is not None else {key: join([one.states[key] for one in results]) for key in results[0].states}
    version = max(result.version for result in results)
    if wants_safetensors(request):
        tensors |= {f"new_hidden_states.{key}": array for key, array in states.items()}
        return respond(tensors, {"model_id": name, "policy_version": str(version)}, None)

    def write(_: bytes) -> Acted:
        texts = {key: written(key, array, body.encoding) for key, array in tensors.items()}
        answer = Acted(
            model_id=name,
            actions=texts["actions"],
            action_log_probs=texts["action_log_probs"],
            policy_version=version,
            policy_spans=spans(results),
        )
        if "value_estimates" in texts:
            answer["value_estimates"] = texts["value_estimates"]
        if states:
            answer["new_hidden_states"] = {key: written(key, one, body.encoding) for key, one in states.items()}
        if new is not None:
            answer["new_sessions"] = new
        return answer

    return respond(tensors, {}, await off_loop(request, write))
