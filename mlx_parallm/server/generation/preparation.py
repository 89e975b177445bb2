"""The one way from a call to a model, whatever dialect the call came in.

A dialect builds a `GenerationCall`. `prepare` finds the model and the adapter, renders and tokenises the prompt, checks
it against the model, and returns a `Generation` that has not begun; `responses.respond` runs it, and the dialect's
writer turns what comes of it into bytes.
"""

import asyncio
from collections.abc import Collection as Collection_
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from mlx_parallm.config import ServeConfig
from mlx_parallm.errors import InvalidRequestError, ModelNotFoundError
from mlx_parallm.runtime.client import TrainingClient
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.constraints import compiled_grammar
from mlx_parallm.server.generation.http_call import Generation, PreparedCall
from mlx_parallm.server.generation.limits import sampling_for
from mlx_parallm.server.generation.tokenizers import TokenizerPool, own_images
from mlx_parallm.server.http.request_state import state_of
from mlx_parallm.server.model_table import DEFAULT, ModelTable
from mlx_parallm.types import Collection, CompletionNames
from mlx_parallm.validation import check_choices

MAX_ANSWERS = 8192  # of one request


def completion_name(prefix: str, request: Request) -> str:
    """A response's id in dialects that make it from the request's."""
    return f"{prefix}{state_of(request.scope).id}"


class GenerationService:
    def __init__(
        self, models: ModelTable, config: ServeConfig, tokenizers: TokenizerPool, training: TrainingClient
    ) -> None:
        self._models = models
        self._config = config.batch
        self._tokenizers = tokenizers
        self._training = training

    async def prepare(self, call: GenerationCall, request: Request, completion_id: str) -> Generation:
        """What a call asks for, not handed to a model yet. `completion_id`: what its dialect calls the response;
        feedback finds it by that name."""
        call = await self._with_checkpoint(call)
        await self._models.use(call.model, request)
        served, version = self._models.version_of(call.model, call.lora_adapter)
        caller = current_caller.get()
        prompts = own_images(await self._tokenizers.prompts(call, served), caller.tenant)
        grammar = await compiled_grammar(call, served, prompts.inside_thinking, self._tokenizers)
        call = self._with_defaults(call, state_of(request.scope).sent_fields)
        default = self._config.max_tokens
        text = None if grammar is None else grammar[0]
        sampling = [sampling_for(call, served, len(prompt), text, default) for prompt in prompts.tokens]
        check_choices(call.sampling.n, self._config.max_batch_size)  # before anything is made for each of them
        if len(prompts.tokens) * call.sampling.n > MAX_ANSWERS:
            raise InvalidRequestError(f"n: at most {MAX_ANSWERS} answers fit in one request, of all prompts", param="n")
        if call.collect_trajectory and prompts.images is not None:
            param = "collect_trajectory"
            raise InvalidRequestError(f"{param}: images can't be learnt from", param=param, code="invalid_value")
        scorer = None
        if call.collect_trajectory:
            adapter = None if version is None else version.name
            if adapter is not None and not caller.may_use_adapter(adapter):
                raise ModelNotFoundError(f"there is no adapter {adapter!r} here", param="collect_trajectory")
            scorer = call.scoring_function or self._training.scorer_for(call.metadata)
            self._training.check_collects(served.name, adapter, scorer, call.metadata)
        state = state_of(request.scope)
        request_id = state.id
        generation = Generation(
            served,
            replace(call, cache_salt=caller.cache_salt(call.cache_salt)),
            PreparedCall(version, prompts, sampling, None if grammar is None else grammar[1]),
            names=CompletionNames(call.request_id or request_id, completion_id, request_id),
            timeout=self._config.request_timeout_seconds or None,
            caller=caller,
        )
        state.summary = generation.summary
        if version is not None or generation.is_arm:
            state.adapter = "base" if version is None else version.label
        if scorer is not None:  # else its reward comes later, as feedback
            generation.score = partial(self._score, generation, scorer)
        return generation

    def _with_defaults(self, call: GenerationCall, sent: Collection_[str]) -> GenerationCall:
        """Fills in the server's own defaults for what the client did not send."""
        defaults = {"temperature": self._config.default_temperature, "top_p": self._config.default_top_p}
        wanted: dict[str, Any] = {
            name: value for name, value in defaults.items() if value is not None and name not in sent
        }
        return replace(call, sampling=replace(call.sampling, **wanted)) if wanted else call

    async def _with_checkpoint(self, call: GenerationCall) -> GenerationCall:
        """A call that names a checkpoint of training, by `model` or by `lora_adapter`, names its adapter then."""
        if call.lora_adapter is not None:
            label = await self._models.checkpoint(call.lora_adapter)
            return call if label is None else replace(call, lora_adapter=label)
        label = await self._models.checkpoint(call.model)
        return call if label is None else replace(call, model=DEFAULT, lora_adapter=label)

    def _score(self, generation: Generation, scoring_function: str) -> "asyncio.Future[dict[int, float]]":
        collection = Collection(generation.recorded(), scoring_function, generation.call.metadata)
        return asyncio.wrap_future(self._training.collect(collection))
