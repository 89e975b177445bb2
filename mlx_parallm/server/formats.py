"""How OpenAI's two routes answer: whole, and in chunks. `server.openai` makes one format per call.

A chunk that carries only text, which is nearly every chunk, is a constant beginning and end around that text.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from mlx_parallm.errors import ParallmError
from mlx_parallm.server.generation import ChoiceStream, ChoiceUpdate, Collected, Generation
from mlx_parallm.server.models import ServedModel
from mlx_parallm.server.sse import DONE, event
from mlx_parallm.text.detokenize import Vocabulary
from mlx_parallm.text.parsers.calls import CallDelta
from mlx_parallm.types import TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a client wants to see beside the text."""

    logprobs: bool = False
    token_ids: bool = False
    prompt_logprobs: bool = False
    usage: bool = False  # at the end of a stream
    running_usage: bool = False  # in every chunk
    policy: bool = False  # which adapter version made which tokens
    echoed: dict[str, Any] = field(default_factory=dict)  # what comes back as it was sent


class ResponseWriter(ABC):
    """What chat and completions share: the envelope, usage, and the fast way to write text."""

    whole: str  # "object" of a whole answer
    part: str  # "object" of a chunk
    ending = DONE
    media_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self, name: str, served: ServedModel, generation: Generation, wishes: ResponseOptions, model: str
    ) -> None:
        self.served = served
        self.generation = generation
        self.wishes = wishes
        self._envelope = {"id": name, "created": int(time.time()), "model": model}
        self._fingerprint = {"system_fingerprint": served.fingerprint, **wishes.echoed}
        self._plain = not (wishes.logprobs or wishes.token_ids or wishes.running_usage or wishes.policy)
        self._frames = [self._frame(choice) for choice in generation.choices]

    @abstractmethod
    def _skeleton(self, choice: ChoiceStream, text: str) -> dict[str, Any]:
        """A chunk's choice that has this text and no other news."""

    @abstractmethod
    def _choice(self, choice: ChoiceStream, news: ChoiceUpdate) -> dict[str, Any]:
        """A chunk's choice with all of its news."""

    @abstractmethod
    def answer(self, results: Sequence[Collected]) -> dict[str, Any]:
        """The whole answer."""

    def chunk(self, choice: ChoiceStream, news: ChoiceUpdate) -> bytes:
        piece = news.piece
        if self._plain and news.finish_reason is None and not piece.reasoning and not piece.calls:
            if not piece.content:
                return b""
            before, after = self._frames[choice.index]
            return before + orjson.dumps(piece.content) + after
        if not piece and news.finish_reason is None and not news.logprobs and not self.wishes.token_ids:
            return b""
        return event(self._chunk([self._choice(choice, news)]))

    def closing(self) -> bytes:
        rewards = self.generation.rewards
        if rewards is not None:  # they are known when all choices have ended
            found = [rewards.get(choice.index) for choice in self.generation.choices]
            return event({**self._chunk([]), "rewards": found}) + self._last_usage()
        return self._last_usage()

    def _last_usage(self) -> bytes:
        if not self.wishes.usage:
            return b""
        return event({**self._envelope, "object": self.part, "choices": [], **self._fingerprint, "usage": self.usage()})

    def failure(self, error: ParallmError) -> bytes:
        return event(error.body())

    def usage(self) -> dict[str, Any]:
        choices, prompt_tokens = self.generation.choices, self.generation.prompt_tokens
        completion_tokens = sum(choice.completion_tokens for choice in choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in choices[:: self.generation.n])
            },
            "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._envelope, "object": self.part, "choices": choices, **self._fingerprint}
        if self.wishes.usage or self.wishes.running_usage:
            chunk["usage"] = self.usage() if self.wishes.running_usage else None
        return chunk

    def _policy(self, choice: ChoiceStream, ended: bool) -> dict[str, Any]:
        if not self.wishes.policy:
            return {}
        found: dict[str, Any] = {"policy_version": choice.policy_version}
        if ended:
            found |= {"policy_spans": choice.policy_spans, "mixed_policy": choice.mixed_policy}
        if self.generation.rewards is not None:
            found["reward"] = self.generation.rewards.get(choice.index)
        return found

    def _frame(self, choice: ChoiceStream) -> tuple[bytes, bytes]:
        """The bytes around a chunk's text. The mark between them needs no escaping and can't occur elsewhere."""
        mark = f"\x00{self._envelope['id']}"
        before, after = event(self._chunk([self._skeleton(choice, mark)])).split(orjson.dumps(mark), 1)
        return before, after

    def _whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            **self._envelope,
            "object": self.whole,
            "choices": choices,
            "usage": self.usage(),
            **self._fingerprint,
            **more,
        }


class ChatWriter(ResponseWriter):
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def opening(self) -> bytes:
        return b"".join(event(self._opening(choice)) for choice in self.generation.choices)

    def _opening(self, choice: ChoiceStream) -> dict[str, Any]:
        chunk = self._chunk([self._skeleton(choice, "")])
        chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        if self.wishes.token_ids:
            chunk["prompt_token_ids"] = self.generation.prompts[choice.prompt]
        return chunk

    def _skeleton(self, choice: ChoiceStream, text: str) -> dict[str, Any]:
        return {"index": choice.index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _choice(self, choice: ChoiceStream, news: ChoiceUpdate) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if news.piece.content:
            delta["content"] = news.piece.content
        if news.piece.reasoning:
            delta["reasoning_content"] = delta["reasoning"] = news.piece.reasoning
        if news.piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in news.piece.calls]
        part = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(news.logprobs),
            "finish_reason": news.finish_reason,
        }
        if news.finish_reason is not None:
            part["stop_reason"] = choice.stop_reason
        if self.wishes.token_ids:
            part["token_ids"] = news.tokens
        return part | self._policy(choice, news.finish_reason is not None)

    def answer(self, results: Sequence[Collected]) -> dict[str, Any]:
        choices = [self._message(*pair) for pair in zip(self.generation.choices, results, strict=True)]
        more: dict[str, Any] = {}
        if self.wishes.prompt_logprobs:
            found = self.generation.choices[0].prompt_logprobs or []
            more["prompt_logprobs"] = prompt_logprobs(found, self.served.vocabulary)
        if self.wishes.token_ids:
            more["prompt_token_ids"] = self.generation.prompts[0]
        return self._whole(choices, **more)

    def _message(self, choice: ChoiceStream, result: Collected) -> dict[str, Any]:
        content = "".join(result.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning := "".join(result.reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if result.calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in result.calls]
        answer = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return answer | ({"token_ids": result.tokens} if self.wishes.token_ids else {}) | self._policy(choice, True)

    def _logprobs(self, entries: Sequence[tuple[TokenLogprob, int]]) -> dict[str, Any] | None:
        if not self.wishes.logprobs:
            return None
        vocabulary = self.served.vocabulary
        content = [
            {
                **_token(vocabulary, entry.token, entry.logprob),
                "top_logprobs": [_token(vocabulary, token, logprob) for token, logprob in entry.top],
            }
            for entry, _ in entries
        ]
        return {"content": content, "refusal": None}


class CompletionWriter(ResponseWriter):
    whole = part = "text_completion"

    def __init__(
        self,
        name: str,
        served: ServedModel,
        generation: Generation,
        wishes: ResponseOptions,
        model: str,
        echo: list[str] | None,
    ) -> None:
        self._echo = echo  # the prompts' texts, when answers begin with them
        super().__init__(name, served, generation, wishes, model)

    def opening(self) -> bytes:
        if self._echo is None and not self.wishes.token_ids:
            return b""
        return b"".join(event(self._chunk([self._opening(choice)])) for choice in self.generation.choices)

    def _opening(self, choice: ChoiceStream) -> dict[str, Any]:
        part = self._skeleton(choice, self._echo[choice.prompt] if self._echo is not None else "")
        if self._echo is not None and self.wishes.logprobs:
            part["logprobs"] = self._logprobs(self._prompt_entries(choice), 0)
        if self.wishes.token_ids:
            part["prompt_token_ids"] = self.generation.prompts[choice.prompt]
        return part

    def _skeleton(self, choice: ChoiceStream, text: str) -> dict[str, Any]:
        return {"text": text, "index": choice.index, "logprobs": None, "finish_reason": None}

    def _choice(self, choice: ChoiceStream, news: ChoiceUpdate) -> dict[str, Any]:
        part = self._skeleton(choice, news.piece.content)
        part["finish_reason"] = news.finish_reason
        if self.wishes.logprobs:
            part["logprobs"] = self._logprobs(news.logprobs, self._start(choice))
        if news.finish_reason is not None:
            part["stop_reason"] = choice.stop_reason
        if self.wishes.token_ids:
            part["token_ids"] = news.tokens
        return part | self._policy(choice, news.finish_reason is not None)

    def answer(self, results: Sequence[Collected]) -> dict[str, Any]:
        return self._whole([self._text(*pair) for pair in zip(self.generation.choices, results, strict=True)])

    def _text(self, choice: ChoiceStream, result: Collected) -> dict[str, Any]:
        echo = self._echo[choice.prompt] if self._echo is not None else ""
        answer = self._skeleton(choice, echo + "".join(result.content))
        answer["finish_reason"], answer["stop_reason"] = choice.finish_reason, choice.stop_reason
        if self.wishes.logprobs:
            prompt = self._prompt_entries(choice) if self._echo is not None else []
            shifted = [(entry, place + self._start(choice)) for entry, place in result.logprobs]
            answer["logprobs"] = self._logprobs([*prompt, *shifted], 0)
        if self.wishes.prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or [], self.served.vocabulary)
        if self.wishes.token_ids:
            answer["token_ids"] = result.tokens
            answer["prompt_token_ids"] = self.generation.prompts[choice.prompt]
        return answer | self._policy(choice, True)

    def _start(self, choice: ChoiceStream) -> int:
        return len(self._echo[choice.prompt]) if self._echo is not None else 0

    def _prompt_entries(self, choice: ChoiceStream) -> list[tuple[TokenLogprob, int]]:
        """The prompt's tokens with their places; the first has nothing before it that could predict it."""
        tokens, vocabulary = self.generation.prompts[choice.prompt], self.served.vocabulary
        known = choice.prompt_logprobs or [None] * len(tokens)
        entries: list[tuple[TokenLogprob, int]] = []
        place = 0
        for token, entry in zip(tokens, known, strict=True):
            entries.append((entry or TokenLogprob(token, float("nan"), 0), place))
            place += len(vocabulary.text(token)) if token not in vocabulary.special else 0
        return entries

    def _logprobs(self, entries: Sequence[tuple[TokenLogprob, int]], start: int) -> dict[str, Any]:
        text = self.served.vocabulary.text
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
        return {self.served.vocabulary.text(token): finite(logprob) for token, logprob in reversed(likeliest)}


def finite(logprob: float) -> float | None:
    return None if logprob != logprob else max(logprob, LOWEST_LOGPROB)


def _token(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    spelled = vocabulary.spell(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}


def prompt_logprobs(entries: Sequence[TokenLogprob | None], vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """vLLM's shape: per prompt token an object from token id to its logprob; null for the first."""
    return [None if entry is None else _by_id(entry, vocabulary) for entry in entries]


def _by_id(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.text(token)}
        for token, logprob, rank in [*ranked, (entry.token, entry.logprob, entry.rank)]
    }


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _call(call: CallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
