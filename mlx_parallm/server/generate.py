"""`/generate` for trainers: tokens in, tokens out with their log-probabilities, in our own shape, vLLM's or SGLang's.

A body is told by its fields (`shapes.shape_of`), made into the body of a completion, and answered in its own shape.
The token that ends an answer is part of it, with its log-probability, and every answer says which adapter version made
which tokens.
"""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.errors import ParallmError
from mlx_parallm.server import answers
from mlx_parallm.server.formats import finite
from mlx_parallm.server.generation import ChoiceStream, ChoiceUpdate, Collected, Generation
from mlx_parallm.server.models import ServedModel
from mlx_parallm.server.openai import OpenAI
from mlx_parallm.server.routing import JSONRoute, add_routes
from mlx_parallm.server.schemas import CompletionBody
from mlx_parallm.server.shapes import GenerateInput, SglangBody, VllmBody
from mlx_parallm.server.sse import DONE, event
from mlx_parallm.types import TokenLogprob

GENERATE_TOKENS = 128  # unless a body says how many


class Generate:
    def __init__(self, openai: OpenAI) -> None:
        self._openai = openai

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JSONRoute, tags=["RL data plane"])
        route = ("/generate", "POST", self.generate, answers.Generated, "Sample from the policy")
        add_routes(router, route, streams=True)
        return router

    async def generate(self, body: GenerateInput, request: Request) -> Response:
        """Tokens or text in; tokens, text, log-probabilities and adapter versions out. The bodies of vLLM's and
        SGLang's `/generate` are answered in their own shapes."""
        completion = _completion(body) if isinstance(body, SglangBody) else body
        served, generation = await self._openai.begin(completion, request, "gen", GENERATE_TOKENS)
        form: GenerateWriter
        if isinstance(body, SglangBody):
            form = SglangWriter(body, completion, served, generation, request)
        elif isinstance(body, VllmBody):
            form = VllmWriter(completion, served, generation, request)
        else:
            form = OwnWriter(body, served, generation, request)
        return await self._openai.respond(completion, request, generation, form)


def _completion(body: SglangBody) -> CompletionBody:
    try:
        return body.completion()
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=body.model_dump()) from error


class GenerateWriter:
    """What the three have in common."""

    ending = DONE
    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, body: CompletionBody, served: ServedModel, generation: Generation, request: Request) -> None:
        self.body = body
        self.served = served
        self.generation = generation
        self.name: str = body.request_id or request.scope["request_id"]
        self._begun = time.perf_counter()
        self._so_far = [Collected() for _ in generation.choices]

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def chunk(self, choice: ChoiceStream, news: ChoiceUpdate) -> bytes:
        self._so_far[choice.index].add(news)
        return self._frame(self._part(choice, news))

    def failure(self, error: ParallmError) -> bytes:
        return self._frame(error.body())

    def _frame(self, part: Any) -> bytes:
        return event(part)

    @abstractmethod
    def _part(self, choice: ChoiceStream, news: ChoiceUpdate) -> Any: ...

    @abstractmethod
    def answer(self, results: Sequence[Collected]) -> Any: ...

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun

    def _text(self, result: Collected) -> str:
        return "".join(result.content)


class OwnWriter(GenerateWriter):
    def _common(self, choice: ChoiceStream) -> dict[str, Any]:
        # A model without adapters has no versions: then the number is the client's own.
        asked, registry = self.body.policy_version, self.served.engine.adapters
        version = asked if asked is not None and not len(registry) else choice.policy_version
        return {"request_id": self.name, "policy_version": version, "step_id": self.body.step_id}

    def _current(self) -> int:
        """What the name of the request's own adapter means now; 0 for the model alone."""
        version = self.generation.version
        return 0 if version is None else self.served.engine.adapters.newest(version).number

    def _part(self, choice: ChoiceStream, news: ChoiceUpdate) -> dict[str, Any]:
        ended = news.finish_reason is not None
        return {
            **self._common(choice),
            "completion_ids": news.tokens,
            "text": news.piece.content,
            "logprobs": self._logprobs(news.scores),
            "finish_reason": news.finish_reason,
            **(self._at_the_end(choice) if ended else {}),
        }

    def answer(self, results: Sequence[Collected]) -> dict[str, Any]:
        choice, result = self.generation.choices[0], results[0]
        return {
            **self._common(choice),
            "prompt_ids": self.generation.prompts[0],
            "completion_ids": result.tokens,
            "text": self._text(result),
            "logprobs": self._logprobs(result.scores),
            "finish_reason": choice.finish_reason,
            **self._at_the_end(choice),
        }

    def _at_the_end(self, choice: ChoiceStream) -> dict[str, Any]:
        return {
            "policy_spans": choice.policy_spans,
            "mixed_policy": choice.mixed_policy,
            "metadata": self._metadata(),
        }

    def _logprobs(self, scores: Sequence[TokenLogprob]) -> list[float | None] | None:
        return None if self.body.logprobs is None else [finite(score.logprob) for score in scores]

    def _metadata(self) -> dict[str, Any]:
        engine = self.served.engine
        return {
            **(self.body.metadata or {}),
            "batch_size": max(1, engine.metrics.running),
            "latency_ms": round(1000 * self.seconds, 3),
            "current_policy_version": self._current(),
        }


class VllmWriter(GenerateWriter):
    """vLLM's: lists over the choices; a token's log-probabilities are objects of one, the sampled first."""

    ending = b""
    media_type = b"application/json"

    def _frame(self, part: Any) -> bytes:
        return orjson.dumps(part) + b"\n"

    def _part(self, choice: ChoiceStream, news: ChoiceUpdate) -> dict[str, Any]:
        return {"text": [self._prompt(choice) + self._text(one) for one in self._so_far]} | self._rest(self._so_far)

    def answer(self, results: Sequence[Collected]) -> dict[str, Any]:
        pairs = zip(self.generation.choices, results, strict=True)
        answer = {"text": [self._prompt(choice) + self._text(result) for choice, result in pairs]}
        if self.body.prompt_logprobs is not None:
            known = self.generation.choices[0].prompt_logprobs or []
            answer["prompt_logprobs"] = [None if one is None else _merged(one) for one in known]  # type: ignore[misc]
        return answer | self._rest(results) | {"prompt_token_ids": self.generation.prompts[0]}

    def _prompt(self, choice: ChoiceStream) -> str:
        """vLLM's text begins with a prompt that was text."""
        prompt = self.body.prompt[choice.prompt]
        return prompt if isinstance(prompt, str) else ""

    def _rest(self, results: Sequence[Collected]) -> dict[str, Any]:
        choices = self.generation.choices
        rest: dict[str, Any] = {
            "request_id": self.name,
            "token_ids": [result.tokens for result in results],
            "finish_reasons": [choice.finish_reason for choice in choices],
            "policy_version": choices[0].policy_version,
            "policy_spans": [choice.policy_spans for choice in choices],
            "mixed_policy": [choice.mixed_policy for choice in choices],
        }
        if self.body.logprobs is not None:
            rest["logprobs"] = [[_separate(score) for score in result.scores] for result in results]
        return rest


def _separate(score: TokenLogprob) -> list[dict[str, float | None]]:
    others = [(token, logprob) for token, logprob in score.top if token != score.token]
    return [{str(token): finite(logprob)} for token, logprob in [(score.token, score.logprob), *others]]


def _merged(score: TokenLogprob) -> dict[str, float | None]:
    return {str(token): finite(logprob) for token, logprob in [*score.top, (score.token, score.logprob)]}


class SglangWriter(GenerateWriter):
    """SGLang's: an object per choice, the text so far in every chunk of a stream."""

    def __init__(
        self,
        asked: SglangBody,
        body: CompletionBody,
        served: ServedModel,
        generation: Generation,
        request: Request,
    ) -> None:
        super().__init__(body, served, generation, request)
        self._asked = asked

    def _part(self, choice: ChoiceStream, news: ChoiceUpdate) -> dict[str, Any]:
        return self._one(choice, self._so_far[choice.index])

    def answer(self, results: Sequence[Collected]) -> Any:
        found = [self._one(*pair) for pair in zip(self.generation.choices, results, strict=True)]
        return found if self._asked.several or len(found) > 1 else found[0]

    def _one(self, choice: ChoiceStream, result: Collected) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._asked.name_of(choice.prompt) or f"{self.name}-{choice.index}",
            "finish_reason": self._finish(choice),
            "prompt_tokens": len(self.generation.prompts[choice.prompt]),
            "completion_tokens": choice.completion_tokens,
            "cached_tokens": choice.cached_tokens,
            "e2e_latency": self.seconds,
            "weight_version": str(choice.policy_version),
            "policy_spans": choice.policy_spans,
            "mixed_policy": choice.mixed_policy,
        }
        if self.body.logprobs is not None:
            meta["output_token_logprobs"] = [self._triple(score.token, score.logprob) for score in result.scores]
            if self._asked.top_logprobs_num:
                meta["output_top_logprobs"] = [[self._triple(*pair) for pair in score.top] for score in result.scores]
        if choice.prompt_logprobs is not None and self._asked.logprob_start_len >= 0:
            tokens, start = self.generation.prompts[choice.prompt], self._asked.logprob_start_len
            known = zip(tokens, choice.prompt_logprobs, strict=True)
            meta["input_token_logprobs"] = [
                self._triple(token, None if one is None else one.logprob) for token, one in list(known)[start:]
            ]
        return {"text": self._text(result), "output_ids": result.tokens, "meta_info": meta, "index": choice.index}

    def _finish(self, choice: ChoiceStream) -> dict[str, Any] | None:
        if choice.finish_reason is None:
            return None
        if choice.finish_reason == "abort":
            return {"type": "abort", "message": "the engine was paused"}
        if choice.finish_reason == "length":
            return {"type": "length", "length": choice.completion_tokens}
        matched = choice.stop_reason if choice.stop_reason is not None else choice.stop_token
        return {"type": "stop", "matched": matched}

    def _triple(self, token: int, logprob: float | None) -> list[Any]:
        text = self.served.vocabulary.text(token) if self._asked.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]
