"""The load generator's own parts: prompts, statistics, and an HTTP client that must read any server's bytes."""

import argparse
import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import orjson
import pytest

from mlx_parallm.bench.load_test import (
    LoadResult,
    LoadSpec,
    Percentiles,
    RequestRecord,
    load,
    make_body,
    make_prompt,
    percentile,
    run_load,
)
from mlx_parallm.cli.bench_command import add_flags, as_dict, draw, notes, parse_list, parse_span, rows
from mlx_parallm.errors import ConfigError, UnavailableError
from mlx_parallm.http_client import ChunkedDecoder, Endpoint, EventParser, WireError, send

SPEC = LoadSpec(url="http://127.0.0.1:1", model="m", concurrency=2, requests=4)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_however_the_bytes_are_cut(size: int) -> None:
    stream = b": keepalive 1/2\n\ndata: one\n\nevent: x\ndata: two\ndata: lines\n\ndata:three\r\n\r\ndata: [DONE]\n\n"
    parser = EventParser()
    found = [event for piece in pieces(stream, size) for event in parser.feed(piece)]
    assert found == [b"one", b"two\nlines", b"three", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_chunked_bodies_are_joined_however_the_bytes_are_cut(size: int) -> None:
    decoder = ChunkedDecoder()
    body = b"4\r\nabcd\r\n3;ext=1\r\n\r\nx\r\nA\r\n0123456789\r\n0\r\n\r\n"
    assert b"".join(decoder.feed(piece) for piece in pieces(body, size)) == b"abcd\r\nx0123456789"
    assert decoder.done


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000"),
        ("host:8000", "http://host:8000"),
        ("https://api.example.com/v1/", "https://api.example.com:443"),
        ("http://[::1]:9/base/v1", "http://[::1]:9/base"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert Endpoint.parse(url).url == expected


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(url)


def test_percentiles() -> None:
    assert percentile([1.0], 0.99) == 1.0
    assert percentile([0.0, 10.0], 0.5) == 5.0
    found = Percentiles.of([float(n) for n in range(101)][::-1])
    assert (found.p50, found.p95, found.p99, found.max, found.mean, found.count) == (50, 95, 99, 100, 50, 101)
    assert Percentiles.of([]) == Percentiles()


def test_prompts_repeat_by_seed_and_differ_within_a_run() -> None:
    spec = replace(SPEC, prompt_words=(5, 9))
    prompts = [make_prompt(spec, index) for index in range(50)]
    assert prompts == [make_prompt(spec, index) for index in range(50)]
    assert len(set(prompts)) == 50
    assert all(5 <= len(prompt.split()) <= 9 for prompt in prompts)
    assert make_prompt(replace(spec, seed=1), 0) != prompts[0]
    salted = [make_prompt(replace(spec, salt="x"), index) for index in range(50)]
    assert not set(salted) & set(prompts)
    assert [len(prompt.split()) for prompt in salted] == [len(prompt.split()) for prompt in prompts]


def test_shared_prefix() -> None:
    spec = replace(SPEC, shared_prefix_words=20, prompt_words=(3, 3))
    words = [make_prompt(spec, index).split() for index in range(2)]
    assert words[0][:20] == words[1][:20]
    assert words[0][20:] != words[1][20:]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 10), (0.5, 20), (1.0, 40)])
def test_streams_take_their_share(share: float, expected: int) -> None:
    bodies = [make_body(replace(SPEC, stream_share=share), index) for index in range(40)]
    assert sum(body["stream"] for body in bodies) == expected
    assert all(("stream_options" in body) == body["stream"] for body in bodies)


def test_bodies() -> None:
    chat = make_body(replace(SPEC, output_tokens=(7, 7), temperature=0.5), 0)
    assert (chat["max_tokens"], chat["temperature"], chat["model"]) == (7, 0.5, "m")
    assert "ignore_eos" not in chat
    text = make_body(replace(SPEC, endpoint="completions", ignore_eos=True), 0)
    assert isinstance(text["prompt"], str)
    assert text["ignore_eos"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"concurrency": 0},
        {"requests": None},
        {"duration": 1.0},
        {"requests": 0},
        {"prompt_words": (5, 4)},
        {"output_tokens": (0, 4)},
        {"stream_share": 1.5},
        {"stream_share": -0.5},
        {"duration": 0.0, "requests": None},
        {"rate": 0.0},
    ],
)
def test_a_bad_spec_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(SPEC, **changes)  # type: ignore[arg-type]


def test_a_spec_at_its_bounds_is_taken() -> None:
    for changes in (
        {"concurrency": 1},
        {"requests": 1},
        {"requests": None, "duration": 0.1},
        {"stream_share": 1.0, "prompt_words": (1, 1), "output_tokens": (1, 1)},
        {"stream_share": 0.0, "rate": 0.01},
    ):
        replace(SPEC, **changes)  # type: ignore[arg-type]


def test_spans_and_lists() -> None:
    assert parse_span("3-9") == (3, 9)
    assert parse_span("64") == (64, 64)
    assert parse_list("1,8,32") == [1, 8, 32]


def test_summary_counts_only_what_ended_right() -> None:
    good = RequestRecord(
        True, 0.0, first=0.5, total=2.0, gaps=[0.1, 0.2], prompt_tokens=10, output_tokens=20, counted=True
    )
    whole = RequestRecord(False, 0.0, total=1.0, prompt_tokens=5, output_tokens=6, counted=True)
    bad = RequestRecord(True, 0.0, first=9.0, output_tokens=99, error="timeout")
    summary = LoadResult(SPEC, [good, whole, bad], seconds=2.0, client_cpu=0.1).summary()
    assert (summary.requests, summary.requests_finished, summary.streams) == (3, 2, 1)
    assert (summary.output_rate, summary.total_rate, summary.request_rate) == (13.0, 20.5, 1.0)
    assert summary.ttft.max == 0.5
    assert summary.itl.count == 2
    assert summary.errors == {"timeout": 1}
    labels = [label for label, _ in rows([summary])]
    assert "error: timeout" in labels
    assert len(notes([summary])) == 1


def test_flags_come_in_groups() -> None:
    parser = argparse.ArgumentParser(prog="bench")
    add_flags(parser)
    titles = [line for line in parser.format_help().splitlines() if line.endswith(":") and line[0] != " "]
    assert titles[-4:] == ["the server:", "requests:", "load:", "results:"]


def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stream = RequestRecord(streamed=True, started=0.0, first=0.1, gaps=[0.01, 0.02], total=0.2, finish_reason="stop")
    draw(
        [LoadResult(replace(SPEC, concurrency=clients), [stream], 1.0, 0.1) for clients in (1, 8)],
        tmp_path / "load.png",
    )
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_json_hides_the_key_and_is_json() -> None:
    result = LoadResult(replace(SPEC, api_key="secret"), [], seconds=1.0, client_cpu=0.0)
    text = orjson.dumps(as_dict(result)).decode()
    assert "secret" not in text
    assert orjson.loads(text)["spec"]["rate"] is None


# Below, a server of a few lines that answers in whatever form the test wants.

T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
    return head.split(" ")[1], await reader.readexactly(int(lengths[0])) if lengths else b""


def sse(*chunks: object) -> bytes:
    events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


STREAM = sse(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}},
)
WHOLE = orjson.dumps(
    {
        "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3},
    }
)


async def openai_like(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Streams in HTTP/1.0 fashion, ended by closing; other answers with a length."""
    _, body = await read_request(reader)
    if orjson.loads(body)["stream"]:
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + STREAM)
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE)
    writer.close()


def with_server(handler: Handler, use: Callable[[str], Awaitable[T]]) -> T:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_tasks.append(asyncio.current_task())
        await handler(reader, writer)
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def main() -> T:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            found = await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await asyncio.gather(*filter(None, open_tasks))
            return found

    open_tasks: list[asyncio.Task[None] | None] = []
    return asyncio.run(main())


def test_a_load_is_counted() -> None:
    done: list[RequestRecord] = []
    result = with_server(openai_like, lambda url: load(replace(SPEC, url=url, requests=10, warmup=3), done.append))
    summary = result.summary()
    assert summary.errors == {}
    assert (summary.requests_finished, summary.streams, len(done)) == (10, 5, 10)
    assert (summary.prompt_tokens, summary.output_tokens, summary.estimated) == (90, 30, 0)
    assert {record.text for record in result.records} == {"Hello"}
    assert {record.finish_reason for record in result.records} == {"stop", "length"}
    assert summary.itl.count == 5


def test_poisson_arrivals_take_their_time() -> None:
    spec = replace(SPEC, requests=20, rate=100.0, concurrency=20)
    result = with_server(openai_like, lambda url: load(replace(spec, url=url)))
    assert 0.05 < result.seconds < 1.0
    assert math.isfinite(result.summary().latency.p99)


def test_duration_ends_the_load() -> None:
    result = with_server(openai_like, lambda url: load(replace(SPEC, url=url, requests=None, duration=0.2)))
    assert 0.2 <= result.seconds < 1.0
    assert len(result.records) > 4


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b'HTTP/1.1 429 No\r\nContent-Length: 30\r\n\r\n{"error":{"code":"queue_full"}}', "HTTP 429: queue_full"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", "HTTP 500: error"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\nshort", "disconnected"),
        (b"garbage\r\n\r\n", "malformed answer"),
        (b"", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "answer without choices"),
    ],
)
def test_failures_are_counted_by_kind(answer: bytes, kind: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer.replace(b"Content-Length: 30", b"Content-Length: 31"))
        writer.close()

    result = with_server(handler, lambda url: load(replace(SPEC, url=url, requests=2, stream_share=0.0)))
    assert result.summary().errors == {kind: 2}


def test_a_stream_that_breaks_off_is_an_error() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        writer.write(head + STREAM.removesuffix(b"data: [DONE]\n\n"))
        writer.close()

    result = with_server(handler, lambda url: load(replace(SPEC, url=url, requests=2, stream_share=1.0)))
    assert result.summary().errors == {"stream without [DONE]": 2}


def test_an_error_inside_a_stream_is_an_error() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = sse({"error": {"message": "out of memory", "code": "unavailable"}})
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        writer.close()

    result = with_server(handler, lambda url: load(replace(SPEC, url=url, requests=1, stream_share=1.0)))
    assert result.summary().errors == {"in stream: unavailable": 1}


def test_a_whole_answer_may_come_in_chunks() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (WHOLE[:5], len(WHOLE) - 5, WHOLE[5:]))
        writer.close()

    result = with_server(handler, lambda url: load(replace(SPEC, url=url, requests=1, stream_share=0.0)))
    assert [record.text for record in result.finished] == ["Hello"]


def test_no_server_is_said_at_once() -> None:
    with pytest.raises(UnavailableError, match="no server answers"):
        run_load(replace(SPEC, model=""))
    assert run_load(SPEC).summary().errors == {"connection refused": 4}


def test_a_silent_server_times_out() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def use(url: str) -> None:
        with pytest.raises(WireError, match="timeout"):
            await send(Endpoint.parse(url), "/health", limit=0.1)

    with_server(handler, use)
