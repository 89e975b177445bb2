"""`/v1/completions`: its body, its responses, how they are written, and the route."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from mlx_parallm.sampling_params import INT64, MAX_LOGPROBS
from mlx_parallm.server.api.openai.common import GenerationBody, call_of, options_of
from mlx_parallm.server.api.openai.response_types import (
    GenerationChunk,
    GenerationResponse,
    PolicyChoice,
    PromptLogprobs,
)
from mlx_parallm.server.api.openai.writer import ResponseOptions, ResponseWriter, prompt_logprobs
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate, Collected, ResponseFinish
from mlx_parallm.server.generation.http_call import Generation
from mlx_parallm.server.generation.preparation import GenerationService, completion_name
from mlx_parallm.server.generation.responses import event, respond
from mlx_parallm.server.generation.token_logprobs import finite
from mlx_parallm.server.http.schema import PromptInput, response_body
from mlx_parallm.types import TokenLogprob


class CompletionBody(GenerationBody):
    """Text to continue."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}
    )
    api_fields: ClassVar = frozenset("best_of suffix user".split())
    prompt: PromptInput = Field(description="Text or token ids, or a list of either")
    echo: bool = Field(False, description="Begin the text with the prompt")
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=INT64,
        description="Must fit the context beside the prompt; default 16; 0 with echo scores the prompt",
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=INT64, description="The same, and goes first")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="So many of the likeliest tokens at each place"
    )
    best_of: int | None = Field(None, ge=1, description="Only as many as n")
    suffix: str | None = Field(None, description="Not supported: filling in the middle needs a model for it")
    add_special_tokens: bool = Field(True, description="Begin a text prompt as the tokenizer does, with its BOS token")

    @field_validator("best_of")
    @classmethod
    def _equals_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n"):
            raise PydanticCustomError("best_of", "best_of must equal n: choices are not ranked")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise PydanticCustomError("suffix", "suffix is not supported")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _something_to_answer(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise PydanticCustomError("max_tokens", "max_tokens 0 leaves nothing to answer unless echo is true")
        return value


COMPLETION_TOKENS = 16  # OpenAI's default


def completion_call(body: CompletionBody, default_max_tokens: int = COMPLETION_TOKENS) -> GenerationCall:
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    return call_of(
        body,
        max_tokens=getattr(body, field),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        prompts=body.prompt,
        add_special_tokens=body.add_special_tokens,
        default_max_tokens=default_max_tokens,
        max_tokens_field=field,
    )


@response_body
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: Annotated[list[int], Field(description="Where each token begins in the choice's text")]


@response_body
class CompletionChoice(PolicyChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: ResponseFinish | None
    stop_reason: NotRequired[
        Annotated[str | int | None, Field(description="The stop string or token id that ended it")]
    ]
    token_ids: NotRequired[Sequence[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


@response_body
class CompletionResponse(GenerationResponse):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@response_body
class CompletionChunk(GenerationChunk):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionWriter(ResponseWriter[CompletionChoice, CompletionChunk]):
    def __init__(
        self,
        name: str,
        generation: Generation,
        options: ResponseOptions,
        echo: list[str] | None,
    ) -> None:
        self._echo = echo  # the prompts' texts, when answers begin with them
        super().__init__(name, generation, options)

    def opening(self) -> bytes:
        if self._echo is None and not self.options.token_ids:
            return b""
        return b"".join(event(self._chunk([self._opening(choice)])) for choice in self.generation.choices)

    def _begin_chunk(self, choices: list[CompletionChoice]) -> CompletionChunk:
        return CompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            object="text_completion",
            choices=choices,
            system_fingerprint=self.served.fingerprint,
        )

    def _opening(self, choice: ChoiceStream) -> CompletionChoice:
        part = self._skeleton(choice, self._echo[choice.prompt] if self._echo is not None else "")
        if self._echo is not None and self.options.logprobs:
            part["logprobs"] = self._logprobs(self._prompt_entries(choice), 0)
        if self.options.token_ids:
            part["prompt_token_ids"] = self.generation.prompts[choice.prompt]
        return part

    def _skeleton(self, choice: ChoiceStream, text: str) -> CompletionChoice:
        return {"text": text, "index": choice.index, "logprobs": None, "finish_reason": None}

    def _choice(self, choice: ChoiceStream, update: ChoiceUpdate) -> CompletionChoice:
        part = self._skeleton(choice, update.piece.content)
        part["finish_reason"] = update.finish_reason
        if self.options.logprobs:
            part["logprobs"] = self._logprobs(update.logprobs, self._start(choice))
        if update.finish_reason is not None:
            part["stop_reason"] = choice.stop_reason
        if self.options.token_ids:
            part["token_ids"] = update.tokens
        self._add_policy(part, choice, update.finish_reason is not None)
        return part

    def answer(self, results: Sequence[Collected]) -> CompletionResponse:
        response = CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            object="text_completion",
            choices=[self._text(*pair) for pair in zip(self.generation.choices, results, strict=True)],
            usage=self.usage(),
            system_fingerprint=self.served.fingerprint,
        )
        self._add_echoed(response)
        return response

    def _text(self, choice: ChoiceStream, result: Collected) -> CompletionChoice:
        echo = self._echo[choice.prompt] if self._echo is not None else ""
        answer = self._skeleton(choice, echo + "".join(result.content))
        answer["finish_reason"] = choice.finish_reason
        answer["stop_reason"] = choice.stop_reason
        if self.options.logprobs:
            prompt = self._prompt_entries(choice) if self._echo is not None else []
            shifted = [(entry, place + self._start(choice)) for entry, place in result.logprobs]
            answer["logprobs"] = self._logprobs([*prompt, *shifted], 0)
        asked = self.options.prompt_logprobs
        answer["prompt_logprobs"] = (
            prompt_logprobs(choice.prompt_logprobs or [], self.served.vocabulary) if asked else None
        )
        if self.options.token_ids:
            answer["token_ids"] = result.tokens
            answer["prompt_token_ids"] = self.generation.prompts[choice.prompt]
        self._add_policy(answer, choice, True)
        return answer

    def _start(self, choice: ChoiceStream) -> int:
        return len(self._echo[choice.prompt]) if self._echo is not None else 0

    def _prompt_entries(self, choice: ChoiceStream) -> list[tuple[TokenLogprob, int]]:
        """The prompt's tokens with their places; the first has nothing before it that could predict it."""
        tokens = self.generation.prompts[choice.prompt]
        vocabulary = self.served.vocabulary
        known = choice.prompt_logprobs or [None] * len(tokens)
        entries: list[tuple[TokenLogprob, int]] = []
        place = 0
        for token, entry in zip(tokens, known, strict=True):
            entries.append((entry or TokenLogprob(token, float("nan"), 0), place))
            place += len(vocabulary.text(token)) if token not in vocabulary.special else 0
        return entries

    def _logprobs(self, entries: Sequence[tuple[TokenLogprob, int]], start: int) -> CompletionLogprobs:
        text = self._token_text
        return {
            "tokens": [text(entry.token) for entry, _ in entries],
            "token_logprobs": [finite(entry.logprob) for entry, _ in entries],
            "top_logprobs": [self._top(entry) for entry, _ in entries],
            "text_offset": [place + start for _, place in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        if entry.rank == 0:
            return None
        likeliest = [*entry.top, (entry.token, entry.logprob)]
        # Of tokens that read alike, the likeliest is kept: it is written last.
        return {self._token_text(token): finite(logprob) for token, logprob in reversed(likeliest)}


class CompletionRoutes:
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continues each prompt, `n` times. With `stream`, chunks arrive as server-sent events."""
        generation = await self._service.prepare(completion_call(body), request, completion_name("cmpl-", request))
        echo = None
        if body.echo:
            echo = [_prompt_text(body, generation, number) for number in range(len(generation.prompts))]
        options = options_of(body, body.logprobs is not None)
        writer = CompletionWriter(generation.completion_id, generation, options, echo)
        return await respond(generation, writer, request)


def _prompt_text(body: CompletionBody, generation: Generation, number: int) -> str:
    prompt = body.prompt[number]
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return generation.served.vocabulary.decode(generation.prompts[number], skip_special=True)
