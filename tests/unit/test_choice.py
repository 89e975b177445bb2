"""One choice from the engine's deltas to the client's news: counts, special marks, stops, logprobs, finish reasons."""

import pytest

from mlx_parallm.policy_spans import PolicySpan, spans_between
from mlx_parallm.server.generation.choices import ChoiceStream, Collected
from mlx_parallm.text.detokenize import TextStream, Vocabulary
from mlx_parallm.text.parsers.chat_parser import ChatParser, Thinking
from mlx_parallm.text.parsers.tool_format import ToolFormat
from mlx_parallm.types import Delta, TokenLogprob
from tests.unit.vocabularies import byte_level

# The marks are special tokens, which text leaves out unless they mean something.
TOKENIZER = byte_level(["<think>", "</think>", "<call>", "</call>", "<arg>"])
VOCABULARY = Vocabulary(TOKENIZER)
MARKS = frozenset(TOKENIZER.convert_tokens_to_ids(["<think>", "</think>", "<call>", "</call>"]))
CALLS = ToolFormat(
    "<call>", "</call>", native=True, parse=lambda body, _: dict(zip(("name", "id"), body.split("<arg>"), strict=True))
)


def parser(**options: bool) -> ChatParser:
    return ChatParser(thinking=Thinking("<think>", "</think>"), tool_format=CALLS, **options)


def choice(stop: tuple[str, ...] = (), chat: ChatParser | None = None) -> ChoiceStream:
    return ChoiceStream(0, 0, TextStream(VOCABULARY, stop, visible=MARKS if chat else ()), chat, stop_token_ids=[65])


def feed(subject: ChoiceStream, text: str, size: int, reason: str | None = "stop", logprobs: bool = False) -> Collected:
    tokens = TOKENIZER.encode(text)
    collected = Collected()
    for at in range(0, max(len(tokens), 1), size):
        part = tokens[at : at + size]
        known = [TokenLogprob(token, -1.0, 1) for token in part] if logprobs else None
        last = at + size >= len(tokens)
        delta = Delta("id", 0, part, known, finish_reason=reason if last else None)  # type: ignore[arg-type]
        if news := subject.take(delta):
            collected.add(news)
    return collected


@pytest.fixture(params=[1, 4, 100])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_plain_text(size: int) -> None:
    subject = choice()
    collected = feed(subject, "héllo<think>", size, "length")
    assert "".join(collected.content) == "héllo"
    assert collected.tokens == TOKENIZER.encode("héllo<think>")
    assert (subject.completion_tokens, subject.finish_reason) == (7, "length")


def test_special_marks_split_a_chat(size: int) -> None:
    subject = choice(chat=parser())
    collected = feed(subject, "<think>hm</think>\nSo:<eos> <call>add<arg>7</call>", size)
    assert "".join(collected.reasoning) == "hm"
    assert "".join(collected.content) == "So:"
    assert [(call.name, call.id) for call in collected.calls] == [("add", "7")]
    assert subject.finish_reason == "tool_calls"
    assert subject.reasoning_tokens == 3  # with the mark that ends it


def test_length_stays_length_in_a_call(size: int) -> None:
    subject = choice(chat=parser())
    feed(subject, "<call>add<arg>7</call> and", size, "length")
    assert subject.finish_reason == "length"


def test_the_first_of_no_parallel_calls_ends_it(size: int) -> None:
    subject = choice(chat=parser(parallel=False))
    collected = feed(subject, "<call>add<arg>7</call><call>add<arg>8</call>", size, None)
    assert [call.id for call in collected.calls] == ["7"]
    assert subject.finish_reason == "tool_calls"


def test_stop_string_ends_it_and_late_news_is_ignored() -> None:
    subject = choice(stop=("STOP",))
    collected = feed(subject, "abSTOPcd", 1, None)
    assert "".join(collected.content) == "ab"
    assert (subject.finish_reason, subject.stop_reason) == ("stop", "STOP")
    assert subject.completion_tokens == 6
    assert subject.take(Delta("id", 0, [1], finish_reason="length")) is None


def test_logprobs_wait_for_their_text_and_stop_with_it() -> None:
    subject = choice(stop=("STOP",))
    collected = feed(subject, "aSTxSTOP", 1, None, logprobs=True)
    assert [(VOCABULARY.text(entry.token), place) for entry, place in collected.logprobs] == [
        ("a", 0), ("S", 1), ("T", 2), ("x", 3),
    ]  # fmt: skip


def test_the_token_that_ends_it_is_counted() -> None:
    subject = choice()
    news = subject.take(Delta("id", 0, [66], finish_reason="stop", stop_token=65))
    assert news is not None
    assert (list(news.tokens), subject.completion_tokens, subject.stop_reason) == ([66, 65], 2, 65)
    ended = choice()
    ended.take(Delta("id", 0, [], finish_reason="stop", stop_token=TOKENIZER.eos_token_id))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_a_version_that_made_no_token_has_no_span() -> None:
    subject = choice()
    subject.take(Delta("id", 0, [66] * 3, spans=(PolicySpan(0, 3, 1),)))
    assert subject.policy_spans == [[0, 3, 1]]
    subject.take(Delta("id", 0, [66] * 3, spans=spans_between([(0, 1), (3, 2), (3, 3), (6, 4)], 6)))
    assert subject.policy_spans == [[0, 3, 1], [3, 6, 3]]
    assert (subject.policy_version, subject.mixed_policy) == (3, True)
