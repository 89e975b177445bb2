"""The client of Atropos' trainer protocol: what groups mean, and an API that comes, goes and forgets."""

import gzip
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError, UnavailableError
from mlx_parallm.training.integrations.atropos.atropos_batches import trajectories_of
from mlx_parallm.training.integrations.atropos.atropos_client import AtroposClient, AtroposConfig
from mlx_parallm.training.rl.trajectories import Trajectory

TOKENS = [5, 6, 7, 8, 9]
M = -100


def group(**changes: Any) -> dict[str, Any]:
    """Two answers of three tokens to a prompt of two; everything that the API sends, as it sends it."""
    given: dict[str, Any] = dict.fromkeys(
        "advantages ref_logprobs messages generation_params inference_logprobs overrides group_overrides".split()
    )
    given |= {"images": None, "env_id": 0, "distill_token_ids": None, "distill_logprobs": None}
    given |= {"tokens": [TOKENS, TOKENS], "masks": [[M, M, 7, 8, 9]] * 2, "scores": [1.0, -1.0]}
    return given | changes


def parsed(**changes: Any) -> list[Trajectory]:
    found = trajectories_of({"batch": [group(**changes)]})
    assert found.skipped == 0
    return found.trajectories


def test_a_group_is_trajectories_of_one_group() -> None:
    found = trajectories_of({"batch": [group(), group()]})
    assert found.skipped == 0
    assert len(found.trajectories) == 4
    first, second, third, _ = found.trajectories
    assert (first.prompt_ids, first.completion_ids, first.mask) == ([5, 6], [7, 8, 9], None)
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert first.group_id == second.group_id != third.group_id
    assert first.advantage is None
    assert first.logprobs is None
    assert first.off_policy
    assert first.metadata == {"env_id": 0}


@pytest.mark.parametrize(
    ("mask", "prompt", "learnt"),
    [
        ([M, M, 7, 8, 9], [5, 6], None),
        ([M, 6, 7, 8, 9], [5], None),
        ([M, M, M, M, 9], [5, 6, 7, 8], None),
        ([M, 6, M, 8, M], [5], [True, False, True, False]),  # turns: somebody else's tokens are between ours
        ([M, 6, M, M, 9], [5], [True, False, False, True]),
        ([5, 6, 7, 8, 9], [5], None),  # nothing comes before the first
        ([5, M, 7, 8, 9], [5, 6], None),
        ([M, 1, 1, 0, 0], [5], None),  # only -100 is a mask
    ],
)
def test_masks(mask: list[int], prompt: list[int], learnt: list[bool] | None) -> None:
    one = parsed(masks=[mask, mask])[0]
    assert one.prompt_ids == prompt
    assert one.completion_ids == TOKENS[len(prompt) :]
    assert one.mask == learnt


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        (None, None),
        ([], None),  # what an environment's base class sends for nothing
        ([0.5, 1], 0.5),
        ([None, 1.0], None),
        ([[0.1] * 5, [0.0] * 5], 0.1),
        ([[9.0, 9.0, 0.1, 0.1, 0.1], [0.0] * 5], 0.1),
        ([[9.0, math.nan, 1.0, 2.0, 6.0], [0.0] * 5], 3.0),  # of the prompt, nobody asks
    ],
)
def test_advantages(advantages: Any, expected: float | None) -> None:
    assert parsed(advantages=advantages)[0].advantage == expected


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ([1.0, 1.0, -0.5, -1.0, -2.0], [-0.5, -1.0, -2.0]),
        ([0.0, None, -0.5, -1, 0], [-0.5, -1.0, 0.0]),
        ([1.0, 1.0, -0.5, 1e-6, -2.0], [-0.5, 0.0, -2.0]),  # rounding
        ([1.0, 1.0, -0.5, -1.0, 1.0], None),  # padded by a managed server that was told too few
        ([1.0, 1.0, -0.5, math.nan, -2.0], None),
        ([1.0, 1.0, -0.5, -math.inf, -2.0], None),
        ([1.0, 1.0, -0.5, "-1", -2.0], None),
        ([-0.5, -1.0, -2.0], None),
        (None, None),
        (-0.5, None),
    ],
)
def test_logprobs(logprobs: Any, expected: list[float] | None) -> None:
    one, other = parsed(inference_logprobs=[logprobs, [1.0, 1.0, -1.0, -1.0, -1.0]])
    assert one.logprobs == expected
    assert one.off_policy == (expected is None)
    assert other.logprobs == [-1.0] * 3


def test_logprobs_between_turns_are_nothing() -> None:
    one = parsed(masks=[[M, 6, M, 8, M]] * 2, inference_logprobs=[[1.0, -0.5, 1.0, -0.25, math.nan]] * 2)[0]
    assert one.logprobs == [-0.5, 0.0, -0.25, 0.0]
    assert one.mask == [True, False, True, False]


@pytest.mark.parametrize("logprobs", [[], [[1.0, 1.0, -0.5, -1.0, -2.0]], {}])
def test_logprobs_of_some_alone_are_of_none(logprobs: Any) -> None:
    assert [one.logprobs for one in parsed(inference_logprobs=logprobs)] == [None, None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.0),
        ({"generation_params": {"temperature": 0.7}, "group_overrides": {"temperature": 0.5}}, 0.7),
        ({"group_overrides": {"temperature": 0.5}}, 0.5),
        ({"overrides": [{"temperature": 0.9}, {}], "generation_params": {"temperature": 0.7}}, 0.9),
        ({"overrides": [{"temperature": 0.9}]}, 1.0),  # nobody can tell whose it is
        ({"generation_params": {"temperature": 0}}, 1.0),
        ({"generation_params": {"temperature": "hot"}}, 1.0),
    ],
)
def test_temperatures(changes: dict[str, Any], expected: float) -> None:
    assert parsed(**changes)[0].temperature == expected


def test_an_override_takes_an_answer_out() -> None:
    found = parsed(overrides=[{"set_advantage_to_zero": True}, None], advantages=[0.5, 0.25])
    assert [one.advantage for one in found] == [0.0, 0.25]


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        group(tokens=[]),
        group(tokens=[TOKENS]),
        group(tokens=[TOKENS, TOKENS[:4]]),
        group(tokens=[TOKENS, "tokens"]),
        group(tokens=[TOKENS, [5, 6, 7, 8, -9]]),
        group(tokens=[TOKENS, [5, 6, 7, 8, 9.5]]),
        group(tokens=[TOKENS, [5, 6, 7, 8, True]]),
        group(tokens=[TOKENS, None]),
        group(masks=[[M, M, 7, 8, 9]]),
        group(masks=[[M, M, 7, 8, 9], [M] * 5]),
        group(masks=[[M, M, 7, 8, 9], [5, M, M, M, M]]),
        group(masks=[[M, M, 7, 8, 9], [M, M, 7, 8, None]]),
        group(tokens=[TOKENS, []], masks=[[M, M, 7, 8, 9], []]),
        group(scores=[1.0]),
        group(scores=[1.0, math.nan]),
        group(scores=[1.0, math.inf]),
        group(scores=[1.0, None]),
        group(scores=[1.0, 10**400]),
        group(scores=1.0),
        group(advantages=[0.5]),
        group(advantages=[0.5, math.nan]),
        group(advantages=[0.5, "much"]),
        group(advantages=[0.5, [1.0, 2.0]]),
        group(advantages=[0.5, [0.0, 0.0, 1.0, math.inf, 1.0]]),
        group(advantages=[0.5, [0.0, 0.0, 1.7e308, 1.7e308, 1.6e308]]),
    ],
)
def test_a_malformed_group_is_skipped_whole(bad: Any) -> None:
    found = trajectories_of({"batch": [bad, group()]})
    assert found.skipped == 1
    assert len(found.trajectories) == 2


def test_long_sequences_are_skipped_and_no_batch_is_nothing() -> None:
    assert trajectories_of({"batch": [group()]}, max_token_len=5).skipped == 0
    assert trajectories_of({"batch": [group()]}, max_token_len=4).skipped == 1
    nothing: list[dict[str, Any]] = [{"batch": None}, {"batch": []}, {}, {"batch": "none"}]
    for batch in nothing:
        found = trajectories_of(batch)
        assert (found.trajectories, found.skipped) == ([], 0)


@pytest.mark.parametrize(
    "wrong", [{"url": "ftp://x"}, {"batch_size": 0}, {"num_steps": -1}, {"starting_step": -1}, {"poll_seconds": 0}]
)
def test_a_config_that_can_not_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AtroposConfig(**{"url": "http://127.0.0.1:8000"} | wrong)


@dataclass
class Api:
    """An API as a real one behaves, its odd sides included; `answers` come before all that, by path."""

    size: int = -1  # of batches; -1: no trainer
    step: int = 0
    queue: list[dict[str, Any]] | None = None
    started: bool | None = None  # None: no trainer has ever registered
    registrations: list[dict[str, Any]] = field(default_factory=list)
    resets: int = 0
    answers: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, *groups: dict[str, Any]) -> None:
        """As an environment does. The queue comes with the first of them, trainer or not."""
        with self.lock:
            self.queue = [*(self.queue or []), *groups]

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        with self.lock:
            if self.answers.get(path):
                return self.answers[path].pop(0)
            try:
                return 200, json.dumps(getattr(self, "on" + path.replace("/", "_"))(body)).encode()
            except (AttributeError, TypeError):
                return 500, b"Internal Server Error"

    def on_register(self, body: bytes) -> dict[str, Any]:
        self.registrations.append(json.loads(body))
        if self.queue is None:
            self.queue, self.started = [], False
            self.size, self.step = self.registrations[-1]["batch_size"], self.registrations[-1]["starting_step"]
        return {"uuid": 2**100}

    def on_info(self, _: bytes) -> dict[str, Any]:
        return {"batch_size": self.size, "max_token_len": 64}

    def on_status(self, _: bytes) -> dict[str, Any]:
        return {"current_step": self.step, "queue_size": len(self.queue or [])}

    def on_reset_data(self, _: bytes) -> str:
        self.resets += 1
        if self.queue is not None:
            self.queue, self.size, self.step, self.started = None, -1, 0, False
        return "Reset successful"

    def on_batch(self, _: bytes) -> dict[str, Any]:
        if self.started is None:
            return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
        self.started = True
        count = self.size // 2
        if self.size < 0 or len(self.queue) < count:  # type: ignore[arg-type]
            return {"batch": None}
        assert self.queue is not None
        self.step += 1
        batch, self.queue = self.queue[:count], self.queue[count:]
        return {"batch": batch}


@contextmanager
def serving(api: Api, port: int = 0) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = api.answer(self.path, body)
            self.send_response(status)
            if len(content) > 1000:
                content = gzip.compress(content)
                self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client_of(port: int, **changes: Any) -> AtroposClient:
    usual: dict[str, Any] = {"batch_size": 4, "max_token_len": 64, "poll_seconds": 0.02, "check_seconds": 0.1}
    return AtroposClient(AtroposConfig(f"http://127.0.0.1:{port}/", **usual | {"timeout": 5.0} | changes))


@contextmanager
def running(client: AtroposClient) -> Iterator[list[list[Trajectory]]]:
    batches: list[list[Trajectory]] = []
    stop = threading.Event()
    thread = threading.Thread(target=client.run, args=(batches.append, stop))
    thread.start()
    try:
        yield batches
    finally:
        stop.set()
        thread.join(10)
        client.close()
        assert not thread.is_alive()


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_api_that_is_started_again_gets_the_trainer_back() -> None:
    first, second = Api(), Api()
    with ExitStack() as stack:
        with serving(first) as port:
            client = client_of(port, checkpoint_dir="/c", num_steps=9, starting_step=3, wandb_group="g")
            batches = stack.enter_context(running(client))
            wait_until(lambda: first.started is True)
            first.post(*(group(scores=[float(number), -1.0]) for number in range(4)))
            wait_until(lambda: len(batches) == 2)
            first.post(group())  # half a batch, which goes with the API
        wait_until(lambda: client.counts.failures >= 2)
        with serving(second, port):
            wait_until(lambda: second.started is True)
            second.post(*(group(scores=[float(number), -1.0]) for number in range(4, 8)), {"tokens": []}, group())
            wait_until(lambda: len(batches) == 5)
    assert [one.reward for batch in batches[:4] for one in batch][::2] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [each["starting_step"] for each in second.registrations] == [5]
    assert first.resets == second.resets == 0
    counts = client.counts
    assert (counts.batches, counts.trajectories, counts.skipped, counts.reconnects) == (5, 18, 1, 1)
    assert client.step == 8
    assert first.registrations == [
        {
            "wandb_group": "g",
            "wandb_project": "mlx-parallm",
            "batch_size": 4,
            "max_token_len": 64,
            "checkpoint_dir": "/c",
            "save_checkpoint_interval": 500,
            "starting_step": 3,
            "num_steps": 9,
        }
    ]


def test_an_api_that_comes_later_or_only_blinks() -> None:
    api = Api()
    with serving(Api()) as port:
        pass
    with running(client_of(port)) as batches:
        time.sleep(0.1)
        for _ in range(2):
            with serving(api, port):
                api.post(group(), group())
                wait_until(lambda: api.started is True and not api.queue)
        wait_until(lambda: bool(batches))
    # It had data before there was a trainer, so it was reset; when it came back as it was, it knew the trainer.
    assert api.resets == 1
    assert len(api.registrations) == 2


def test_a_trainer_that_is_started_again_goes_on() -> None:
    api = Api()
    with serving(api) as port:
        with running(client_of(port)):
            wait_until(lambda: api.started is True)
        api.post(*[group()] * 4)
        with running(client_of(port, batch_size=8, starting_step=1)) as batches:  # the API keeps the first size
            wait_until(lambda: len(batches) == 2)
        with running(client_of(port, reset=True, starting_step=7)) as batches:
            wait_until(lambda: api.step == 7)
            api.post(*[group()] * 2)
            wait_until(lambda: len(batches) == 1)
    assert [each["starting_step"] for each in api.registrations] == [0, 1, 7]


@pytest.mark.parametrize("others", ["no trainer", "another trainer"])
def test_an_api_that_is_reset_under_our_feet_is_noticed(others: str) -> None:
    api = Api()
    with serving(api) as port:
        client = client_of(port, starting_step=2)
        with running(client) as batches:
            wait_until(lambda: api.started is True)
            with api.lock:
                api.on_reset_data(b"")
                if others == "another trainer":
                    api.on_register(b'{"batch_size": 4, "starting_step": 0}')
            api.post(group())  # so that it goes on to say that there is no batch yet
            wait_until(lambda: client.counts.reconnects == 1)
            api.post(*[group()] * 2)
            wait_until(lambda: len(batches) == 1)
    assert client.counts.reconnects == 1


def test_answers_that_make_no_sense_are_lived_through() -> None:
    api = Api()
    bad = [(500, b"NaN"), (200, b"<html>"), (200, b"[]"), (200, b"[" * 100_000), (200, b" " * 70_000), (404, b"")]
    api.answers = {
        "/batch": list(bad),
        "/register": list(bad[:2]),
        "/info": [(200, b"{}"), (200, b'{"batch_size": 1.5}')],
    }
    with serving(api) as port:
        client = client_of(port, max_bytes=150_000, poll_seconds=0.001)
        with running(client) as batches:
            wait_until(lambda: not any(api.answers.values()))
            wait_until(lambda: api.started is True)
            api.post(*[group()] * 2)
            wait_until(lambda: len(batches) == 1)
    assert client.counts.failures == len(bad) + 4
    assert client.counts.reconnects == 0


def test_limits_of_size_and_time() -> None:
    api = Api()
    with serving(api) as port:
        client = client_of(port, max_bytes=1000)
        client.register()
        assert client.poll() is None
        api.answers = {"/batch": [(200, b" " * 2000 + b"{}")]}
        with pytest.raises(UnavailableError, match="more than 1000 bytes"):
            client.poll()
        client.close()
        client = client_of(port, timeout=0.1)
        with api.lock, pytest.raises(UnavailableError):
            client.register()
        client.close()


def test_what_is_done_with_a_batch_may_fail() -> None:
    """That is no trouble of the network, and ends the run."""
    api = Api()
    with serving(api) as port:
        client = client_of(port)
        client.register()
        api.post(*[group()] * 2)

        def on_batch(_: list[Trajectory]) -> None:
            raise RuntimeError("the engine has died")

        with pytest.raises(RuntimeError, match="the engine has died"):
            client.run(on_batch, threading.Event())
        client.close()


def test_the_waits_between_attempts_grow_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(9, poll_seconds=1.0)
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) > 8

    def poll() -> None:
        raise UnavailableError("there is nobody")

    monkeypatch.setattr(client, "poll", poll)
    client.run(lambda _: None, Stop())
    client.close()
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]
