"""Batches from an Atropos trajectory API (`run-api`): this server as the trainer that environments wait for.

Environments post scored groups to the API, and a trainer that has registered takes them from there, one batch at a
time. `Atropos.run` does that on a thread of its own and hands trajectories to whoever trains: a session's `update`, or
its buffer. It owns the registration, which it makes again when the API has been started anew, and what a group of the
API means as trajectories. `Environment` keeps an environment's process beside the server. Blocking; no MLX.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.errors import ConfigError, InvalidRequestError, UnavailableError
from mlx_parallm.http_client import Endpoint
from mlx_parallm.training.trajectories import Trajectory

log = logging.getLogger(__name__)

MASKED = -100  # in an Atropos mask: not learnt from
ROUNDING = 1e-4  # by which a log-probability may be above 0
LONGEST_WAIT = 30.0  # seconds between attempts at an API that does not answer
REGISTRATIONS = 3  # attempts, where the API holds data from before anybody had registered
FIRST_WAIT = 1.0  # seconds until an environment that has failed is started again; twice as many each time
LOOK_SECONDS = 0.2  # how often an environment is looked after

# What an environment's interpreter runs. Its input stays open as long as the server lives, however that ends, and the
# first line of it has the flags that other users of the machine must not read.
CHILD = """
import json, os, runpy, signal, sys, threading
sys.argv = sys.argv[1:] + json.loads(sys.stdin.readline())
def follow():
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=follow, daemon=True).start()
if sys.argv[0].endswith(".py"):
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class AtroposConfig:
    """Where the API is, and what it tells the environments about this trainer."""

    url: str
    batch_size: int = 32  # sequences in a batch
    max_token_len: int = 2048  # of a sequence, prompt and all; 0: any
    checkpoint_dir: str = ""
    num_steps: int = 1000
    save_checkpoint_interval: int = 500
    starting_step: int = 0
    wandb_project: str = "mlx-parallm"
    wandb_group: str = "mlx-parallm"
    poll_seconds: float = 1.0
    check_seconds: float = 10.0  # how often an API without a batch is asked whether it still knows us
    timeout: float = 60.0  # seconds, of each call as a whole
    max_bytes: int = 1 << 28  # of an answer
    reset: bool = False  # at first, throw away what the API holds: its queue, and the environments it knows

    def __post_init__(self) -> None:
        Endpoint.parse(self.url)
        for name in ("batch_size", "num_steps", "save_checkpoint_interval", "max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_token_len", "starting_step"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, and is {getattr(self, name)}")
        for name in ("poll_seconds", "check_seconds", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, and is {getattr(self, name)}")


@dataclass(slots=True)
class Counts:
    batches: int = 0
    trajectories: int = 0
    skipped: int = 0  # groups that made no sense
    reconnects: int = 0  # registrations after the first
    failures: int = 0  # calls that came to nothing


# What a batch means.


@dataclass(slots=True)
class Parsed:
    trajectories: list[Trajectory] = field(default_factory=list)
    skipped: int = 0  # groups


def trajectories_of(batch: Mapping[str, Any], max_token_len: int = 0) -> Parsed:
    """Of an answer to /batch. Groups that are malformed, or have a sequence that is too long, are skipped whole."""
    parsed = Parsed()
    groups = batch.get("batch")
    for group in groups if isinstance(groups, list) else ():
        try:
            parsed.trajectories += _group(group, max_token_len)
        except (InvalidRequestError, OverflowError) as error:
            parsed.skipped += 1
            log.warning("a group from Atropos is skipped: %s", error)
    return parsed


def _group(group: Any, max_token_len: int) -> list[Trajectory]:
    if not isinstance(group, dict):
        raise InvalidRequestError("it is no object")
    tokens, masks, scores = (_list(group.get(name), name) for name in ("tokens", "masks", "scores"))
    count = len(tokens)
    if not count or count != len(masks) or count != len(scores):
        raise InvalidRequestError(f"{count} sequences, {len(masks)} masks, {len(scores)} scores")
    # An environment's base class sends empty lists for what nobody gave.
    advantages = _list(group.get("advantages") or [None] * count, "advantages")
    if len(advantages) != count:
        raise InvalidRequestError(f"{count} sequences, {len(advantages)} advantages")
    logprobs = _for_each(group.get("inference_logprobs"), count)
    overrides = [each if isinstance(each, dict) else {} for each in _for_each(group.get("overrides"), count)]
    name = f"atropos-{uuid.uuid4().hex}"
    found = []
    for place, ids in enumerate(tokens):
        one = _trajectory(ids, masks[place], scores[place], advantages[place], logprobs[place], max_token_len)
        one.group_id = name
        one.temperature = _temperature(overrides[place], group.get("generation_params"), group.get("group_overrides"))
        if overrides[place].get("set_advantage_to_zero"):
            one.advantage = 0.0
        if (environment := group.get("env_id")) is not None:
            one.metadata["env_id"] = environment
        found.append(one)
    return found


def _trajectory(
    tokens: Any, mask: Any, score: Any, advantage: Any, logprobs: Any, max_token_len: int = 0
) -> Trajectory:
    tokens, mask = _integers(tokens, "tokens"), _integers(mask, "masks")
    if len(tokens) != len(mask) or min(tokens, default=0) < 0:
        raise InvalidRequestError(f"{len(tokens)} tokens with a mask of {len(mask)}, or a negative token")
    if 0 < max_token_len < len(tokens):
        raise InvalidRequestError(f"a sequence has {len(tokens)} tokens, over {max_token_len}")
    # Nothing comes before the first token, so nothing can be learnt about it.
    learnt = [place for place in range(1, len(mask)) if mask[place] != MASKED]
    if not learnt:
        raise InvalidRequestError("there is no token to learn from")
    start = learnt[0]
    known = _logprobs(logprobs, learnt, len(tokens))
    return Trajectory(
        tokens[:start],
        tokens[start:],
        _finite(score, "score"),
        logprobs=known,
        mask=None if len(learnt) == len(tokens) - start else [value != MASKED for value in mask[start:]],
        advantage=_advantage(advantage, learnt, len(tokens)),
        off_policy=known is None,
    )


def _advantage(given: Any, learnt: Sequence[int], length: int) -> float | None:
    """One number for the answer: where each token has its own, their mean over those learnt from."""
    if given is None:
        return None
    if not isinstance(given, list):
        return _finite(given, "advantage")
    if len(given) != length:
        raise InvalidRequestError(f"{length} tokens, {len(given)} advantages")
    values = [_finite(given[place], "advantage") for place in learnt]
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _logprobs(given: Any, learnt: Sequence[int], length: int) -> list[float] | None:
    """Of the completion. Tokens that nobody drew have a 1 there, and get 0: they are masked."""
    if not isinstance(given, list) or len(given) != length:
        return None
    found = [0.0] * (length - learnt[0])
    for place in learnt:
        value = given[place]
        if not isinstance(value, int | float) or not -math.inf < value <= ROUNDING:
            return None
        found[place - learnt[0]] = min(float(value), 0.0)
    return found


def _temperature(*sources: Any) -> float:
    """The first that says one; what was drawn greedily is scored as at 1, like the server's own."""
    for source in sources:
        if isinstance(source, dict) and "temperature" in source:
            value = source["temperature"]
            return float(value) if isinstance(value, int | float) and 0 < value < math.inf else 1.0
    return 1.0


def _for_each(values: Any, count: int) -> list[Any]:
    """Of every sequence. A list of another length can't be told apart, and says nothing."""
    return values if isinstance(values, list) and len(values) == count else [None] * count


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} is no list")
    return value


def _integers(value: Any, name: str) -> list[int]:
    values = _list(value, name)
    if not all(type(each) is int for each in values):
        raise InvalidRequestError(f"{name} are not all integers")
    return values


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"a {name} is not a finite number")
    return float(value)


# The client.


class Atropos:
    """One trainer at an API. `register` and `poll` raise `UnavailableError` where it can't be had; `run` never does."""

    def __init__(self, config: AtroposConfig) -> None:
        self.config = config
        self.counts = Counts()
        self.url = Endpoint.parse(config.url).url
        self._registrations = 0
        self._known = False  # to the API
        self._next_check = 0.0
        self._api_step = 0  # the highest that the API has told since we registered
        # No connection is kept: between two batches there may be minutes, and another API.
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(config.timeout, connect=min(5.0, config.timeout)),
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def step(self) -> int:
        """Batches, counted from where the training began."""
        return self.config.starting_step + self.counts.batches

    def close(self) -> None:
        self._http.close()

    def run(self, on_batch: Callable[[list[Trajectory]], None], stop: threading.Event) -> None:
        """Until `stop`, or until `on_batch` raises. The next batch is asked for when `on_batch` has returned."""
        delay, failures = 0.0, 0
        while not stop.wait(delay):
            try:
                found = self.poll()
            except UnavailableError as error:
                delay = min(LONGEST_WAIT, self.config.poll_seconds * 2 ** min(failures, 16))
                failures += 1
                log.warning("%s; again in %.1f s", error, delay)
                continue
            failures = 0
            delay = 0.0 if found else self.config.poll_seconds
            if found:
                on_batch(found)

    def poll(self) -> list[Trajectory] | None:
        """The next batch; None: there is none yet. Registers first where the API does not know us."""
        if not self._known:
            self.register()
        elif time.monotonic() >= self._next_check:
            self._check()
        answer = self._json("GET", "/batch")
        if answer.get("status") == "error":
            log.warning("the Atropos API at %s has forgotten this trainer: %s", self.url, answer.get("message"))
            self.register()
            return None
        if not answer.get("batch"):
            return None
        parsed = trajectories_of(answer, self.config.max_token_len)
        self.counts.batches += 1
        self.counts.trajectories += len(parsed.trajectories)
        self.counts.skipped += parsed.skipped
        self._next_check = time.monotonic() + self.config.check_seconds
        return parsed.trajectories

    def register(self) -> None:
        """An API that has taken data before any trainer registered would never give a batch: it is reset first."""
        self._known = False
        if self.config.reset and not self._registrations:
            self._call("GET", "/reset_data")
        for _ in range(REGISTRATIONS):
            self._json("POST", "/register", self._registration())
            size, step = self._state()
            if size > 0:
                break
            log.warning("the Atropos API at %s holds data from before a trainer was there; it is reset", self.url)
            self._call("GET", "/reset_data")
        else:
            raise self._failure(f"the Atropos API at {self.url} does not take the registration")
        if size != self.config.batch_size:
            log.warning("Atropos keeps the batch size of an earlier trainer, %d", size)
        self._note(step)
        self._known = True
        self.counts.reconnects += self._registrations > 0
        self._registrations += 1
        log.info("registered with Atropos at %s, step %d", self.url, self.step)

    def _registration(self) -> dict[str, Any]:
        config = self.config
        return {
            "wandb_group": config.wandb_group,
            "wandb_project": config.wandb_project,
            "batch_size": config.batch_size,
            "max_token_len": config.max_token_len,
            "checkpoint_dir": config.checkpoint_dir,
            "save_checkpoint_interval": config.save_checkpoint_interval,
            "starting_step": self.step,
            "num_steps": config.num_steps,
        }

    def _check(self) -> None:
        """An API that was reset may go on to say that there is no batch yet."""
        size, step = self._state()
        if size > 0 and step >= self._api_step:
            self._note(step)
            return
        log.warning("the Atropos API at %s was reset: step %d after %d", self.url, step, self._api_step)
        self.register()

    def _state(self) -> tuple[int, int]:
        """Its batch size, which is -1 where it knows no trainer, and its step."""
        size, step = self._json("GET", "/info").get("batch_size"), self._json("GET", "/status").get("current_step")
        if not isinstance(size, int) or not isinstance(step, int):
            raise self._failure(f"what answers at {self.url} is no Atropos API")
        return size, step

    def _note(self, step: int) -> None:
        self._api_step = step
        self._next_check = time.monotonic() + self.config.check_seconds

    # Calls.

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = json.loads(self._call(method, path, body))
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            return answer
        raise self._failure(f"Atropos at {self.url}{path} has not answered with a JSON object")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            with self._http.stream(method, path, json=body) as response:
                content = self._body(response)
        except (httpx.HTTPError, OSError) as error:
            raise self._failure(f"Atropos at {self.url}{path}: {str(error) or type(error).__name__}") from None
        if response.status_code != 200:
            excerpt = content[:200].decode("utf-8", "replace")
            raise self._failure(f"Atropos at {self.url}{path}: status {response.status_code}, {excerpt}")
        return content

    def _body(self, response: httpx.Response) -> bytes:
        """httpx has a limit for each piece, not for their sum."""
        until, content = time.monotonic() + self.config.timeout, bytearray()
        for piece in response.iter_bytes():
            content += piece
            if len(content) > self.config.max_bytes:
                raise httpx.ReadError(f"an answer of more than {self.config.max_bytes} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"no complete answer within {self.config.timeout:g} s")
        return bytes(content)

    def _failure(self, message: str) -> UnavailableError:
        self.counts.failures += 1
        self._next_check = 0.0  # what answers next may be another API
        return UnavailableError(message)


# The environment.


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """What to start, and where it finds the API and this server."""

    command: str  # FILE.py or a module's name; flags of its own may follow, and come last
    api_url: str
    server_url: str
    log: Path  # its output goes there
    api_key: str | None = None
    model: str = "default"
    grace_seconds: float = 5.0  # from being asked to end to being ended

    def __post_init__(self) -> None:
        program = self.program[0]
        if program.endswith(".py") and not Path(program).is_file():
            raise ConfigError(f"environment: there is no file {program}")

    @property
    def program(self) -> list[str]:
        """The file or module, and its own flags."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"environment: {self.command!r} can't be read: {error}") from None
        if not words:
            raise ConfigError("environment: which one?")
        return [str(Path(words[0]).expanduser()) if words[0].endswith(".py") else words[0], *words[1:]]

    def arguments(self, tokenizer: str) -> list[str]:
        """As `BaseEnv.cli` reads them."""
        program, *own = self.program
        return [
            program,
            "serve",
            f"--env.rollout_server_url={self.api_url}",
            f"--env.tokenizer_name={tokenizer}",
            f"--openai.base_url={self.server_url}/v1",
            f"--openai.model_name={self.model}",
            f"--openai.tokenizer_name={tokenizer}",
            "--openai.server_type=vllm",
            *own,
        ]


class AtroposProcess:
    """An environment as a process of its own, which is there while the server and the API are.

    A thread starts it once both answer, ends it on `close`, and starts it again where it fails: an API that was started
    anew does not know it any more, and that ends it. One that ends with 0 has done the steps that it is for.
    `save_tokenizer` writes the model's tokenizer into a folder, from which the environment reads it.
    """

    def __init__(self, config: EnvironmentConfig, save_tokenizer: Callable[[str], object]) -> None:
        self.config = config
        self.starts = 0
        self.pid: int | None = None  # while it runs
        self._save_tokenizer = save_tokenizer
        self._stop = threading.Event()
        self._scratch = tempfile.TemporaryDirectory(prefix="parallm-env-", ignore_cleanup_errors=True)
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)

    def start(self) -> None:
        self._save_tokenizer(self._scratch.name)
        self._thread.start()

    def close(self) -> None:
        """Ends the process, if there is one; nothing starts it again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * self.config.grace_seconds + 10)
        self._scratch.cleanup()

    def _run(self) -> None:
        delay = FIRST_WAIT
        while self._wait_until_ready():
            began = time.monotonic()
            code = self._live()
            if code is None:
                return
            if code == 0:
                log.info("the environment %s has done its steps", self.config.command)
                return
            delay = FIRST_WAIT if time.monotonic() - began > LONGEST_WAIT else delay
            name, output = self.config.command, self.config.log
            log.warning("the environment %s has ended with %d, see %s; again in %.0f s", name, code, output, delay)
            self._stop.wait(delay)
            delay = min(LONGEST_WAIT, 2 * delay)

    def _wait_until_ready(self) -> bool:
        """Until the server and the API answer; False: it is not to start any more."""
        for url in (f"{self.config.server_url}/health", f"{self.config.api_url}/status"):
            while not self._stop.is_set() and not _answers(url):
                self._stop.wait(LOOK_SECONDS)
        return not self._stop.is_set()

    def _live(self) -> int | None:
        """From its start to its end: its exit code, and None where it was to end."""
        config = self.config
        try:
            process = self._started()
        except OSError as error:
            log.error("the environment %s can't be started: %s", config.command, error)
            return -1
        self.starts, self.pid = self.starts + 1, process.pid
        log.info("the environment %s runs as %d, with its output in %s", config.command, process.pid, config.log)
        try:
            while not self._stop.wait(LOOK_SECONDS):
                if (code := process.poll()) is not None:
                    return code
            return None
        finally:
            self._end(process)
            self.pid = None

    def _started(self) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C is ours alone to hear."""
        config = self.config
        config.log.parent.mkdir(parents=True, exist_ok=True)
        with open(config.log, "ab", opener=_private) as output:
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, *config.arguments(self._scratch.name)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.write(json.dumps([f"--openai.api_key={config.api_key or 'none'}"]).encode() + b"\n")
            process.stdin.flush()
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Asks it and what it has started to end, and ends them if they do not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.config.grace_seconds)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except (httpx.HTTPError, OSError):
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
