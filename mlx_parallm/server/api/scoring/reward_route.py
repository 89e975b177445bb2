"""Scalar rewards, by models that predict or by those that training has made of the served model."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from starlette.requests import Request

from mlx_parallm.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from mlx_parallm.server.api.scoring.bodies import RewardBody
from mlx_parallm.server.api.scoring.text_pairs import check_one_label
from mlx_parallm.server.auth.caller import current_caller
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.generation.chat_messages import conversation
from mlx_parallm.server.generation.text_inputs import TextPair, encode_texts, numbered
from mlx_parallm.server.model_table import DEFAULT, ServedModel
from mlx_parallm.server.predictors import ServedPredictor
from mlx_parallm.validation import check_ids


class RewardModels:
    """All that a server can score with, by name. The default is the first that predicts, then the first trained one."""

    def __init__(self, context: ServerContext) -> None:
        self._predictors = context.predictors
        self._training = context.runtime.training
        self._models = context.models
        self._tokenizers = context.tokenizers

    @property
    def _served(self) -> ServedModel:
        """The model that the trained ones stand on."""
        return self._models.default

    async def score(self, body: RewardBody, request: Request) -> tuple[str, list[float], int]:
        """The model's name, a reward for each input, and how many tokens were read."""
        async with AsyncExitStack() as stack:
            kinds = ("reward",) if body.model == DEFAULT else ("reward", "classifier")
            try:
                model = await stack.enter_async_context(self._predictors.use(body.model, *kinds, request=request))
            except ModelNotFoundError as error:
                name = self._trained(body.model, error)
            else:
                return await self._predicted(model, body, request)
        return await self._by_trained(name, body)

    async def _predicted(
        self, model: ServedPredictor, body: RewardBody, request: Request
    ) -> tuple[str, list[float], int]:
        check_one_label(model, "reward texts")
        named = numbered(body.field, len(body.texts))
        encoded = await encode_texts(model, body.texts, self._tokenizers, body.truncation(), named)
        outputs = await model.predict([one.input for one in encoded], request)
        return model.name, [float(logits[0]) for logits in outputs], sum(len(one.input.tokens) for one in encoded)

    def _trained(self, name: str, error: ModelNotFoundError) -> str:
        """The trained reward model of this name."""
        try:
            found = self._training.reward_model_name(name)
            if current_caller.get().may_use_model(found):
                return found
            raise error
        except ModelNotFoundError:
            raise
        except InvalidRequestError:  # there is none at all
            if name != DEFAULT:
                raise error from None
            raise ModelNotFoundError(
                "this server has no reward model: start it with --model-path NAME=FOLDER, or --reward-model FOLDER for "
                "one that training has made",
                param="model",
            ) from None

    async def _by_trained(self, name: str, body: RewardBody) -> tuple[str, list[float], int]:
        named = numbered(body.field, len(body.texts))
        truncation = body.truncation()
        limit = self._served.context_length
        texts = []
        for place, item in enumerate(body.texts):
            tokens = await self._tokens(item, named(place))
            check_ids(tokens, self._served.model.vocab_size, named(place))
            if truncation.tokens is not None:
                keep = limit if truncation.tokens == -1 else min(limit, truncation.tokens)
                tokens = tokens[:keep] if truncation.side == "right" else tokens[-keep:]
            if len(tokens) > limit:
                raise ContextLengthError(
                    f"This model's maximum context length is {limit} tokens. However, {named(place)} resulted in "
                    f"{len(tokens)} tokens. Please reduce its length, or cut it with truncate_prompt_tokens.",
                    param=named(place),
                )
            texts.append(tokens)
        current_caller.get().charge_prompt(sum(map(len, texts)))
        scores = await asyncio.to_thread(partial(self._training.score, name, texts))
        return name, scores, sum(map(len, texts))

    async def _tokens(self, item: Any, param: str) -> list[int]:
        if isinstance(item, TextPair):
            if item.text_pair is not None:
                raise InvalidRequestError("this reward model takes texts or conversations, no pairs", param=param)
            item = item.text
        if not item:
            raise InvalidRequestError(f"{param} is empty", param=param)
        if isinstance(item, str):
            return await self._tokenizers.encode(self._served, item, True)
        if isinstance(item[0], int):
            return list(item)
        rendered = conversation(item, (), add_generation_prompt=False, continue_final_message=False, template_kwargs={})
        return (await self._tokenizers.render(self._served, rendered, False)).tokens
