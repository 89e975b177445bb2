"""The client of an Atropos trajectory API (`run-api`): this server as the trainer that environments wait for.

Environments post scored groups to the API, and a trainer that has registered takes them from there, one batch at a
time. `AtroposClient.run` does that on a thread of the manager's and hands trajectories to whoever trains. It owns the
registration, which it makes again when the API has been started anew. Blocking; no MLX.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from mlx_parallm.errors import ConfigError, UnavailableError
from mlx_parallm.http_client import Endpoint
from mlx_parallm.training.integrations.atropos.atropos_batches import trajectories_of
from mlx_parallm.training.rl.trajectories import Trajectory

log = logging.getLogger(__name__)

LONGEST_WAIT = 30.0  # seconds between attempts at an API that does not answer
REGISTRATIONS = 3  # attempts, where the API holds data from before anybody had registered


@dataclass(frozen=True, slots=True)
class AtroposConfig:
    """The address of the API, and what it tells the environments about this trainer."""

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
    max_bytes: int = 1 << 28  # of a response
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
class AtroposCounts:
    batches: int = 0
    trajectories: int = 0
    skipped: int = 0  # groups that could not be read
    reconnects: int = 0  # registrations after the first
    failures: int = 0  # calls that came to nothing


@dataclass(frozen=True, slots=True)
class ApiState:
    """`batch_size`: -1 where the API knows no trainer."""

    batch_size: int
    step: int


class AtroposClient:
    """One trainer at an API. `register` and `poll` raise `UnavailableError` where it can't be had; `run` never does."""

    def __init__(self, config: AtroposConfig) -> None:
        self.config = config
        self.counts = AtroposCounts()
        self.url = Endpoint.parse(config.url).url
        self._registrations = 0
        self._known = False  # to the API
        self._next_check = 0.0
        self._api_step = 0  # the highest that the API has reported since the registration
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
        """Hands batches to `on_batch` until `stop`, or until it raises. The next is asked for when it has returned."""
        delay = 0.0
        failures = 0
        while not stop.wait(delay):
            try:
                trajectories = self.poll()
            except UnavailableError as error:
                delay = min(LONGEST_WAIT, self.config.poll_seconds * 2 ** min(failures, 16))
                failures += 1
                log.warning("%s; again in %.1f s", error, delay)
                continue
            failures = 0
            delay = 0.0 if trajectories else self.config.poll_seconds
            if trajectories:
                on_batch(trajectories)

    def poll(self) -> list[Trajectory] | None:
        """The next batch; None: there is none yet. Registers first where the API does not know us."""
        if not self._known:
            self.register()
        elif time.monotonic() >= self._next_check:
            self._check()
        response = self._json("GET", "/batch")
        if response.get("status") == "error":
            log.warning("the Atropos API at %s has forgotten this trainer: %s", self.url, response.get("message"))
            self.register()
            return None
        if not response.get("batch"):
            return None
        parsed = trajectories_of(response, self.config.max_token_len)
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
            state = self._state()
            if state.batch_size > 0:
                break
            log.warning("the Atropos API at %s holds data from before a trainer was there; it is reset", self.url)
            self._call("GET", "/reset_data")
        else:
            raise self._failure(f"the Atropos API at {self.url} does not take the registration")
        if state.batch_size != self.config.batch_size:
            log.warning("Atropos keeps the batch size of an earlier trainer, %d", state.batch_size)
        self._note(state.step)
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
        state = self._state()
        if state.batch_size > 0 and state.step >= self._api_step:
            self._note(state.step)
            return
        log.warning("the Atropos API at %s was reset: step %d after %d", self.url, state.step, self._api_step)
        self.register()

    def _state(self) -> ApiState:
        size = self._json("GET", "/info").get("batch_size")
        step = self._json("GET", "/status").get("current_step")
        if not isinstance(size, int) or not isinstance(step, int):
            raise self._failure(f"what answers at {self.url} is no Atropos API")
        return ApiState(batch_size=size, step=step)

    def _note(self, step: int) -> None:
        self._api_step = step
        self._next_check = time.monotonic() + self.config.check_seconds

    # Calls.

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = json.loads(self._call(method, path, body))
        except (ValueError, RecursionError):
            response = None
        if isinstance(response, dict):
            return response
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
        until = time.monotonic() + self.config.timeout
        content = bytearray()
        for piece in response.iter_bytes():
            content += piece
            if len(content) > self.config.max_bytes:
                raise httpx.ReadError(f"a response of more than {self.config.max_bytes} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"no complete response within {self.config.timeout:g} s")
        return bytes(content)

    def _failure(self, message: str) -> UnavailableError:
        self.counts.failures += 1
        self._next_check = 0.0  # what answers next may be another API
        return UnavailableError(message)
