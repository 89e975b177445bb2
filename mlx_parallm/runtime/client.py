"""All that the server sees of what runs behind it: models to generate with, their adapters, and training.

Everything here is in plain values (`types`, `metrics`, `errors`) that could be sent to another process, so that models
elsewhere can stand behind the same routes. In one process `Engine` is a `ModelClient`, its `Registry` an
`AdapterTable`, `LocalAdapters` an `AdapterClient`, `TrainingService` a `TrainingClient`, and `Runtime` the whole.
Calls that change something block until it is done: the server makes them on threads.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mlx_parallm.arms import AutoSplit, Decision
from mlx_parallm.metrics import EngineMetrics, PredictorMetrics, TrainingMetrics
from mlx_parallm.signature import WeightsVersion
from mlx_parallm.text.compiled_grammar import CompiledGrammar
from mlx_parallm.types import (
    AdapterRoute,
    AdapterVersion,
    Collection,
    FeedbackReport,
    ImageInput,
    ModelInfo,
    ModelStatus,
    OnDelta,
    PauseMode,
    PredictorInfo,
    PromptImages,
    RecentGroup,
    Request,
    RolloutCall,
    RolloutSample,
    TrajectoryInput,
    UpdateReport,
)


class AdapterTable(Protocol):
    """A model's adapters by name and version, and what its own name serves."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def routes(self) -> Sequence[AdapterRoute]: ...
    @property
    def chosen(self) -> bool:
        """Whether somebody has said what the model's own name serves."""
        ...

    @property
    def served_version(self) -> int:
        """The version that the model's own name serves; 0: the model alone."""
        ...

    @property
    def policy_version(self) -> int:
        """The same, or else what the name means that was published last."""
        ...

    @property
    def swaps(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def base(self) -> AdapterVersion:
        """The counts of completions without an adapter."""
        ...

    def __contains__(self, name: str) -> bool: ...
    def find(self, name: str, number: int | None = None) -> AdapterVersion:
        """The version that the name means now, or the one of this number; ModelNotFoundError."""
        ...

    def versions(self, name: str) -> Sequence[AdapterVersion]: ...
    def newest(self, version: AdapterVersion) -> AdapterVersion:
        """Returns the version that the name of this one means now; itself, once the name is gone."""
        ...

    def route(self) -> AdapterVersion | None:
        """Returns what the next request for the model's own name gets; None: the model alone."""
        ...

    @property
    def auto(self) -> AutoSplit | None:
        """The rule by which a split of the traffic ends, with the rewards so far."""
        ...

    def serve(self, routes: Sequence[AdapterRoute], auto: AutoSplit | None = None) -> None: ...
    def pin(self, name: str, number: int | None, pinned: bool) -> AdapterVersion: ...


class ImageReader(Protocol):
    """Reads images for a model. May be called on any thread; what it raises for a user is InvalidRequestError."""

    def read(self, pixels: Any) -> ImageInput:
        """An image of (height, width, 3) bytes as the model takes it."""
        ...

    def place(self, prompt: Sequence[int], images: Sequence[ImageInput]) -> tuple[list[int], PromptImages]:
        """A prompt with its images' tokens, in place of those that the chat template has put there for them."""
        ...


class ModelClient(Protocol):
    """One model that generates."""

    on_failure: Callable[[str], None] | None

    @property
    def model(self) -> ModelInfo: ...
    @property
    def tokenizer(self) -> Any:
        """mlx-lm's wrapper around the tokenizer of the model."""
        ...

    @property
    def image_reader(self) -> ImageReader | None:
        """None: it reads text only."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block of the prefix cache; 0: there is none."""
        ...

    @property
    def adapters(self) -> AdapterTable: ...
    @property
    def metrics(self) -> EngineMetrics: ...
    @property
    def failure(self) -> str | None:
        """Why it has stopped for good; None while it runs."""
        ...

    @property
    def paused(self) -> bool: ...
    def submit_all(self, requests: Sequence[Request], on_delta: OnDelta) -> None:
        """Takes all requests or raises; their deltas come to `on_delta`, on the event loop."""
        ...

    def cancel(self, request_id: str, index: int | None = None, visible: int | None = None) -> None: ...
    def check_grammar(self, grammar: str, param: str, quick: bool = False) -> CompiledGrammar | None:
        """Compiles it, for `Request.compiled_grammar`, which may take seconds; raises InvalidRequestError about the
        field `param` where it can't be followed, or is too complex. None: it takes longer than `quick` allows."""
        ...

    def pause(self, mode: PauseMode, timeout: float) -> bool: ...
    def resume(self) -> None: ...
    def flush_cache(self) -> int: ...
    def check_integrity(self) -> None: ...
    def drain(self, timeout: float) -> bool: ...
    def stop(self) -> None: ...
    def describe(self) -> list[tuple[str, str]]: ...


class PredictorClient(Protocol):
    """One model that predicts: a batch of plain values in, a batch out."""

    @property
    def info(self) -> PredictorInfo: ...
    @property
    def metrics(self) -> PredictorMetrics: ...
    @property
    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer`, where inputs are texts."""
        ...

    def predict(self, inputs: Sequence[Any], timeout: float | None = None) -> "Future[list[Any]]":
        """An output for each input, in batches with those of other clients; QueueFullError. Cancelling the future takes
        those that still wait out of the queue."""
        ...

    def update(self, name: str, data: bytes, number: int | None = None) -> WeightsVersion:
        """New weights, in safetensors, from the next batch on; InvalidRequestError where the model takes none."""
        ...

    def rollback(self, name: str, number: int | None = None) -> WeightsVersion:
        """Back to earlier weights; without a number, those before."""
        ...


class AdapterClient(Protocol):
    """Changes to adapters that files or training have a say in. `model` is the served model's name."""

    def load(self, model: str, name: str, path: str, number: int | None = None, *, own: bool = False) -> AdapterVersion:
        """`own`: the model's own name serves it from now on, unless somebody has chosen what that serves."""
        ...

    def publish(
        self,
        model: str,
        name: str,
        data: bytes,
        config: Mapping[str, Any] | bytes | None,
        number: int | None,
        *,
        own: bool = False,
    ) -> AdapterVersion:
        """Weights in safetensors or npz, and adapter_config.json, parsed or as it came; without a config, that of the
        version before holds, or a scale of 1."""
        ...

    on_decision: Callable[[str, Decision], None]  # told of a model whose split has found its better arm

    def checkpoint(
        self, model: str, name: str, may_use: Callable[[str], bool] = lambda name: True
    ) -> AdapterVersion | None:
        """A checkpoint of training by its name, loaded as an adapter of its own; None where there is none, or none of
        an adapter that may be used. Blocks."""
        ...

    def unload(self, model: str, name: str) -> AdapterVersion: ...
    def rollback(
        self, model: str, name: str, number: int | None, checkpoint: str | None
    ) -> tuple[AdapterVersion, str]: ...


class TrainingClient(Protocol):
    """Training of the first model's adapters."""

    @property
    def adapters(self) -> Sequence[str]: ...
    def scorer_for(self, metadata: Mapping[str, Any]) -> str | None:
        """Returns the scorer of collected completions with such metadata, where the request names none; or None."""
        ...

    def check_collects(
        self, model: str, adapter: str | None, scoring_function: str | None, metadata: Mapping[str, Any]
    ) -> None: ...
    def collect(self, collection: Collection) -> "Future[dict[int, float]]": ...
    def update(
        self,
        trajectories: Sequence[TrajectoryInput] | None,
        *,
        adapter: str | None = None,
        publish: bool = True,
        checkpoint_name: str | None = None,
    ) -> UpdateReport: ...
    def feedback(
        self,
        request_id: str,
        reward: float,
        index: int | None = None,
        group_id: str | None = None,
        adapter: str | None = None,
        owner: str | None = None,
        wait: bool = True,
    ) -> FeedbackReport:
        """A reward for an earlier completion; of nobody but `owner`, where one is named. `wait`: for a completion that
        is being given. NotFoundError."""
        ...

    def is_pending(self, request_id: str, index: int | None, owner: str | None) -> bool:
        """Returns whether a completion by that name is being generated. On any thread, and quick."""
        ...

    def checkpoint(self, adapter: str | None, name: str | None) -> tuple[str, str]: ...
    def rollout(self, call: RolloutCall, left: "Future[None] | None" = None) -> list[list[RolloutSample]]:
        """`left`: done when the client has gone, which ends it; QueueFullError, RequestTimeoutError."""
        ...

    def reward_model_name(self, name: str | None) -> str: ...
    def score(self, name: str, texts: Sequence[list[int]]) -> list[float]: ...
    def status(self, adapter: str | None = None) -> dict[str, Any]: ...
    def debug(self, adapter: str | None = None) -> dict[str, Any]: ...
    def recent(self, adapter: str | None, count: int) -> Sequence[RecentGroup]:
        """The groups of completions that came in last, the newest first."""
        ...

    def metrics(self) -> Mapping[str, TrainingMetrics]: ...
    def stop_loops(self) -> None:
        """Tells whatever trains by itself to end its step."""
        ...

    def close(self) -> None:
        """Writes the state of training and ends it."""
        ...


class PoolClient(Protocol):
    """The models that there are, loaded or not, and how they come and go."""

    on_failure: Callable[[str], None] | None  # is told why a model has stopped for good, on its thread

    def statuses(self) -> Sequence[ModelStatus]: ...
    def listen(self, listener: Callable[[], None]) -> None:
        """Has it called when models came or went: who knows models by name must let go of those that have gone."""
        ...

    def acquire(self, name: str) -> "Future[int]":
        """Holds a model for a request, until what the future gives is given to `release`; loads it first where it is
        not loaded."""
        ...

    def release(self, hold: int) -> None: ...
    def load(self, name: str, source: str | None = None, pin: bool | None = None) -> "Future[None]":
        """Loads a model that is known, or the one at `source` under a new name. `pin`: whether it must stay."""
        ...

    def keep_alive(self, name: str, seconds: float) -> None:
        """Sets how long a model stays after its last request: 0 is not at all, `math.inf` pins it."""
        ...

    def unload(self, name: str, timeout: float) -> None:
        """Waits so long for the requests that use a model, and frees its memory."""
        ...

    def drain(self, timeout: float) -> bool:
        """Waits until no request uses a model; False where it takes longer."""
        ...

    def stop(self) -> None: ...


class RuntimeClient(Protocol):
    """The models that generate and are loaded, by name, the default first; those that predict; adapters; training."""

    @property
    def pool(self) -> PoolClient: ...
    @property
    def models(self) -> Mapping[str, ModelClient]: ...
    @property
    def predictors(self) -> Mapping[str, PredictorClient]: ...
    @property
    def adapters(self) -> AdapterClient: ...
    @property
    def training(self) -> TrainingClient: ...
