"""Calls on their way through an engine: what their keys are charged, and what Anthropic's clients are told of tools."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_parallm.config import ServeConfig
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.start import start_engine
from mlx_parallm.errors import ParallmError, QueueFullError, UnavailableError
from mlx_parallm.sampling_params import SamplingParams
from mlx_parallm.server.api.anthropic.writer import MessageOptions, MessageWriter
from mlx_parallm.server.api.responses.bodies import ResponseBody
from mlx_parallm.server.api.responses.writer import ResponsesWriter
from mlx_parallm.server.auth.caller import ANYBODY, Caller
from mlx_parallm.server.auth.keys import Key, KeyLimits
from mlx_parallm.server.auth.rates import KeyUsage
from mlx_parallm.server.generation.call import ChatTurn, GenerationCall
from mlx_parallm.server.generation.choices import ChoiceStream, ChoiceUpdate
from mlx_parallm.server.generation.http_call import CompletionNames, Generation, PreparedCall
from mlx_parallm.server.generation.tokenizers import TokenizedPrompts
from mlx_parallm.server.http.state import Dispatcher
from mlx_parallm.server.model_table import ServedModel
from mlx_parallm.text.prompts import Conversation
from mlx_parallm.types import Delta
from tests.e2e.anthropic_events import joined, read
from tests.engine.harness import as_served

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
dispatcher = Dispatcher()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = start_engine(lambda: as_served("llama"), ServeConfig.of(ssd=False), dispatcher)
    yield running
    running.stop()


def generation_of(engine: Engine, caller: Caller = ANYBODY, **fields: Any) -> Generation:
    call = GenerationCall(sampling=SAMPLING, stream=True, **fields)
    names = CompletionNames("label", "answer", "request")
    served = ServedModel("tiny", engine)
    prepared = PreparedCall(None, TokenizedPrompts([PROMPT]), [SAMPLING])
    return Generation(served, call, prepared, names=names, timeout=None, caller=caller)


class Tokens:
    """Hears of a generation, and waits for a number of its tokens, or for its end."""

    def __init__(self, wanted: int) -> None:
        self._left = wanted
        self.reached = asyncio.Event()

    def on_update(self, choice: ChoiceStream, update: ChoiceUpdate) -> None:
        self._left -= len(update.tokens)
        if self._left <= 0:
            self.reached.set()

    def on_end(self, error: ParallmError | None) -> None:
        assert error is None
        self.reached.set()


@pytest.mark.parametrize("tokens", [3, 60])
def test_what_was_generated_is_charged_once(engine: Engine, tokens: int) -> None:
    usage = KeyUsage()
    caller = Caller(Key("key", "user", b"", limits=KeyLimits(tokens_per_minute=10_000)), usage)

    async def run() -> None:
        dispatcher.bind(asyncio.get_running_loop())
        generation_of(engine, caller).cancel()
        assert usage.expected == 0, "what was never started has nothing reserved"
        generation, listener = generation_of(engine, caller), Tokens(tokens)
        generation.start(listener)
        assert usage.expected == 60
        await asyncio.wait_for(listener.reached.wait(), 60)
        generated = generation.choices[0].completion_tokens
        assert generated >= tokens
        for _ in range(3):  # whoever reads it, and whoever ends its request
            generation.cancel()
            assert (usage.tokens.used, usage.expected) == (generation.prompt_tokens + generated, 0)

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_that_are_streamed_are_blocks_of_their_own(engine: Engine, size: int) -> None:
    calls = [{"name": "clock", "arguments": {"zone": zone}} for zone in ("Rome", "Oslo")]
    text = "So:" + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    chat = ChatTurn(conversation=Conversation([{"role": "user", "content": "?"}], tools=[CLOCK]))
    generation = generation_of(engine, chat=chat)
    [choice], writer = generation.choices, MessageWriter(generation, MessageOptions("request", 400, 16))
    written = writer.opening()
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)
    for at in range(0, len(tokens), size):
        update = choice.take(Delta("answer", 0, tokens[at : at + size]))
        written += writer.chunk(choice, update) if update is not None else b""
    last = choice.take(Delta("answer", 0, [], finish_reason="stop"))
    assert last is not None
    written += writer.chunk(choice, last) + writer.closing()
    message = joined(list(read(iter(written.decode().splitlines()))))
    assert message["stop_reason"] == "tool_use"
    assert message["content"][0] == {"type": "text", "text": "So:"}
    assert [(block["name"], block["input"]) for block in message["content"][1:]] == [
        ("clock", {"zone": "Rome"}),
        ("clock", {"zone": "Oslo"}),
    ]
    assert len({block["id"] for block in message["content"][1:]}) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFullError("the queue is full"), "rate_limit_exceeded"),
        (UnavailableError("it ended", code="replica_lost"), "replica_lost"),
        (ParallmError("it broke"), "server_error"),
    ],
)
def test_a_response_that_failed_says_why(engine: Engine, error: ParallmError, code: str) -> None:
    kept: list[Any] = []
    chat = ChatTurn(conversation=Conversation([{"role": "user", "content": "?"}]))
    body = ResponseBody.model_validate({"input": "?"})
    writer = ResponsesWriter(body, generation_of(engine, chat=chat), kept.append, stores=False)
    event = json.loads(writer.failure(error).partition(b"data: ")[2])
    assert event["type"] == "response.failed"
    assert event["response"]["error"] == {"code": code, "message": error.message}
    assert [response["status"] for response in kept] == ["failed"]
