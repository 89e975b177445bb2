"""Response bodies, for /docs and for the tests that hold every answer against them. Answers are built as plain JSON."""

import json
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Answers of a real server, by the name of their class here.
EXAMPLES: dict[str, Any] = json.loads(files("mlx_parallm.server").joinpath("examples.json").read_text())


class AnswerBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(AnswerBody):
    message: str
    type: str
    param: str | None = Field(description="The field that is wrong, such as messages.0.role")
    code: str | None


class Error(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "message": "temperature: Input should be less than or equal to 2",
                    "type": "invalid_request_error",
                    "param": "temperature",
                    "code": "invalid_value",
                }
            }
        }
    )
    error: ErrorDetail


class PromptTokensDetails(AnswerBody):
    cached_tokens: int = Field(description="Prompt tokens that were computed before and reused")


class CompletionTokensDetails(AnswerBody):
    reasoning_tokens: int


class Usage(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


PromptLogprobs = list[dict[str, Any] | None]


class CompletionLogprobs(AnswerBody):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token begins in the choice's text")


REWARDS = "One for each choice, in the last chunk of a stream whose answers are scored"


class PolicyChoice(AnswerBody):
    """What trainers are told of a choice, when they send any of their fields."""

    policy_version: int | None = Field(None, description="The adapter version that made its newest token; 0: none")
    policy_spans: list[tuple[int, int, int]] | None = Field(
        None, description="[first token, the one after the last, version] over its tokens"
    )
    mixed_policy: bool | None = Field(
        None,
        description="Several versions made it (follow_policy): its log-probabilities are those of no single policy",
    )
    reward: float | None = Field(
        None,
        description="What the scoring_function gave it; streams send `rewards`, one for each choice, in a chunk of its "
        "own at the end",
    )


class PolicyAnswer(AnswerBody):
    """What trainers sent comes back."""

    step_id: int | str | None = None
    request_id: str | None = None
    metadata: dict[str, Any] | None = None


class CompletionChoice(PolicyChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None = Field(None, description="The stop string or token id that ended it")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(PolicyAnswer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class CompletionChunk(CompletionAnswer):
    usage: Usage | None = None  # type: ignore[assignment]
    rewards: list[float | None] | None = Field(None, description=REWARDS)


class TopLogprob(AnswerBody):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerBody):
    content: list[TokenLogprobs]
    refusal: None


class Function(AnswerBody):
    name: str
    arguments: str = Field(description="JSON text")


class ToolCallAnswer(AnswerBody):
    id: str
    type: Literal["function"]
    function: Function


class Message(AnswerBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The same as reasoning_content")
    tool_calls: list[ToolCallAnswer] | None = None


ChatFinish = Literal["stop", "length", "tool_calls", "abort"]  # abort: the engine was paused so


class ChatChoice(PolicyChoice):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(PolicyAnswer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(AnswerBody):
    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerBody):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(AnswerBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(PolicyChoice):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(PolicyAnswer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    rewards: list[float | None] | None = Field(None, description=REWARDS)


class Model(AnswerBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="Where the model came from")
    parent: str | None = Field(description="The base model, for an adapter")
    max_model_len: int


class ModelList(AnswerBody):
    object: Literal["list"]
    data: list[Model]


class Tokens(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"count": 2, "max_model_len": 8192, "tokens": [19556, 17]}})
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"prompt": "Hello, world!"}})
    prompt: str


class Health(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"status": "healthy", "model_loaded": True}})
    status: Literal["healthy", "draining", "unhealthy"]
    model_loaded: bool
    reason: str | None = None


class MetricsSummary(AnswerBody):
    """What /metrics answers to `Accept: application/json`."""

    current_policy_version: int
    queue_depth: int
    max_batch_size: int
    flush_interval_ms: float


class DebugMetrics(AnswerBody):
    batches_processed: int
    avg_batch_fill_pct: float
    batch_fill_hist: list[int] = Field(description="Decode steps by how full the batch was, in tenths")
    queue_depth_last: int
    stream_batches_processed: int
    prompt_tps_last: float
    prompt_tps_avg: float
    decode_tps_last: float
    decode_tps_avg: float
    running: int
    slots_total: int
    slots_free: int
    kv_bytes: int
    kv_bytes_limit: int
    memory: dict[str, int] = Field(description="The budget in bytes: the process's limit, and what each part may hold")
    active_memory: int
    peak_memory: int
    serving_peak_memory: int = Field(description="The same without the pieces of updates")
    spare_memory: int = Field(description="Bytes that MLX keeps for what comes next")
    steps: int
    decode: dict[str, float] = Field(description="Its steps, seconds to start them, and seconds waited for them")
    prefill: dict[str, float] = Field(description="The same for prompts")
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    requests_finished: dict[str, int]
    requests_rejected: int
    preemptions: int
    faults: int = Field(description="Device faults after which all running rows were computed again")
    deduplicated: int
    adapter_seconds: dict[str, float] = Field(
        description="Of the engine's time, for each adapter published, brought in or put beside others"
    )
    prefix: dict[str, int] = Field(description="The prefix cache: lookups, hits, hit_tokens, evictions, blocks, bytes")
    background: dict[str, float] = Field(description="Training: its steps and seconds, and the longest wait for it")
    ssd: dict[str, int] = Field(description="Its tier on SSD: files, bytes, reads, writes, dropped, damaged, pruned")
    models: dict[str, "DebugMetrics"] | None = Field(None, description="Each model's own, when several are served")


class Flushed(AnswerBody):
    success: bool = Field(description="Whether the engine's books balance")
    flushed_blocks: int


class AdapterInfo(AnswerBody):
    name: str
    version: int
    current: bool = Field(description="Whether the name means this version")
    parent: str
    rank: int
    bytes: int
    pinned_requests: int = Field(description="Rows that use it, or wait to")
    pinned: bool = Field(description="Whether it is kept, however many newer ones there are")
    requests: int = Field(description="That it has answered or is answering")
    generated_tokens: int
    source: str
    created: int


class AdapterList(AnswerBody):
    object: Literal["list"]
    data: list[AdapterInfo]


class AdapterChanged(AnswerBody):
    status: Literal["success"]
    name: str
    policy_version: int
    message: str


class Switched(AnswerBody):
    status: Literal["success"]
    model: str
    serves: dict[str, float] = Field(description="Adapters with their shares of the requests")
    policy_version: int
    message: str


class WeightVersion(AnswerBody):
    weight_version: str
    policy_version: int


class ModelInfo(AnswerBody):
    id: str
    model_path: str
    precision: str
    max_model_len: int
    vocab_size: int
    policy_version: int
    serves: dict[str, float]
    adapters: dict[str, int] = Field(description="What each name means: its version")


class ServerInfo(AnswerBody):
    version: str
    model_path: str
    served_model_name: str
    weight_version: str
    max_batch_size: int
    max_queue_size: int
    max_loras: int
    max_lora_rank: int
    is_paused: bool
    models: list[ModelInfo]


class Generated(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "request_id": "r-1",
                "policy_version": 3,
                "step_id": 7,
                "prompt_ids": [504, 3575, 282],
                "completion_ids": [4649, 314, 7042],
                "text": " France is Paris",
                "logprobs": [-0.01, -0.2, -0.1],
                "finish_reason": "length",
                "policy_spans": [[0, 3, 3]],
                "mixed_policy": False,
                "metadata": {"batch_size": 4, "latency_ms": 81.5, "current_policy_version": 3},
            }
        }
    )
    request_id: str
    policy_version: int = Field(description="The adapter version that made the newest token; 0: none")
    step_id: int | str | None
    prompt_ids: list[int]
    completion_ids: list[int] = Field(description="With the token that ended it")
    text: str
    logprobs: list[float] | None = Field(description="One for each of completion_ids")
    finish_reason: Literal["stop", "length", "abort"]
    policy_spans: list[tuple[int, int, int]]
    mixed_policy: bool = Field(
        description="Several versions made it (follow_policy): its log-probabilities are those of no single policy"
    )
    metadata: dict[str, Any]


class TrlGenerated(AnswerBody):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt_ids": [[504, 3575, 282, 4649, 314]],
                "completion_ids": [[7042, 30]],
                "logprobs": [[-0.1, -0.4]],
            }
        }
    )
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]] = Field(description="All completions of the first prompt, then of the next")
    logprobs: list[list[float | None]] | list[list[list[float | None]]] = Field(
        description="Of each token; where `logprobs` was sent, of the likeliest at each place"
    )
    logprob_token_ids: list[list[list[int]]] | None = Field(
        None, description="Whose they are, where `logprobs` was sent"
    )


class WorldSize(AnswerBody):
    model_config = ConfigDict(json_schema_extra={"example": {"world_size": 1}})
    world_size: int


class Updated(AnswerBody):
    policy_version: int
    published: bool
    loss: float | None
    trajectories_used: int
    trajectories_skipped: int = Field(description="Of groups whose rewards are all the same")
    rolled_back: str | None = Field(description="The alarm that brought the last good version back")
    checkpoint: str | None
    saved: bool = Field(description="It is on disk; false where it could not be written, and the log says why")
    metrics: dict[str, float]


class TrainingStatus(AnswerBody):
    training_enabled: bool
    policy_version: int
    current_lora: str | None = None
    updates: int | None = None
    updates_published: int | None = None
    updates_refused: int | None = None
    rollbacks: int | None = None
    trajectories_collected: int | None = None
    trajectories_buffered: int | None = None
    trajectories_ready: int | None = Field(None, description="That have others to be compared with")
    trajectories_used: int | None = None
    trajectories_flat: int | None = Field(None, description="Of groups without a difference, skipped")
    trajectories_stale: int | None = None
    trajectories_dropped: int | None = Field(None, description="To make room in the buffer")
    trajectories_off_policy: int | None = None
    last_update: float | None = None
    last_refusal: str | None = None
    loss: float | None = None
    reward_mean: float | None = None
    kl: float | None = Field(None, description="To the model without the adapter, nats a token, when last measured")
    kl_measured_at_update: int | None = Field(None, description="The number of the update that measured it")
    updates_per_second: float | None = None
    metrics: dict[str, float] | None = Field(
        None,
        description="Of the last update: mismatch_kl, max_logprob_gap, clip_fraction, effective_sample_size, …",
    )
    history: list[dict[str, Any]] | None = Field(None, description="The last 100 updates, the oldest first")
    available_checkpoints: list[str] | None = None
    adapters: list[str] | None = None
    scoring_functions: list[str] | None = None
    scoring_failures: int | None = None
    inference_share: float | None = None
    measured_inference_share: float | None = None
    longest_stall_seconds: float | None = None
    training_seconds: float | None = None
    atropos: dict[str, int] | None = Field(None, description="What the Atropos API has handed out")
    environment: dict[str, Any] | None = Field(None, description="The Atropos environment that was started with it")


class FeedbackTaken(AnswerBody):
    status: Literal["success"]
    request_id: str
    adapter: str
    trajectories_buffered: int
    trajectories_ready: int


class CheckpointWritten(AnswerBody):
    status: Literal["success"]
    checkpoint: str
    path: str


class TrainingInternals(AnswerBody):
    adapter: str
    lora: dict[str, Any]
    config: dict[str, Any]
    updates: int
    trainer_bytes: int = Field(description="LoRA parameters and the optimiser's")
    activation_bytes: int = Field(description="The most that a micro-batch has taken")
    shares_prompts: bool
    parameters: dict[str, list[int]]
    buffer: dict[str, int]
    ledger: int
    collecting: int
    background: dict[str, float]
    status: TrainingStatus


class RolloutSample(AnswerBody):
    request_id: str
    index: int
    completion_ids: list[int]
    text: str
    logprobs: list[float]
    reward: float | None
    finish_reason: str
    policy_version: int
    policy_spans: list[tuple[int, int, int]]


class RolloutGroup(AnswerBody):
    prompt_ids: list[int]
    samples: list[RolloutSample]


class Score(AnswerBody):
    index: int
    object: Literal["reward"]
    score: float


class ScoreUsage(AnswerBody):
    prompt_tokens: int
    total_tokens: int


class Scored(AnswerBody):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class Rollout(AnswerBody):
    groups: list[RolloutGroup]


class Status(AnswerBody):
    status: str


class Paused(AnswerBody):
    is_paused: bool


ERRORS = {
    400: "The request is wrong; `param` says where",
    401: "No key, or a wrong one",
    404: "No such model (code `model_not_found`)",
    413: "The body is too large",
    429: "The queue is full; `Retry-After` says when to try again",
    503: "The server is shutting down, or its engine has died",
    504: "The request took longer than the server allows",
}


def responses(model: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route in the OpenAPI document."""
    answer: dict[str, Any] = {"model": model, "description": "The answer"}
    if streams:
        answer["description"] += ", or with `stream` its chunks as server-sent events, then `[DONE]`"
        answer["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    if model.__name__ in EXAMPLES:
        answer.setdefault("content", {})["application/json"] = {"example": EXAMPLES[model.__name__]}
    documented: dict[int | str, dict[str, Any]] = {200: answer}
    for code, text in ERRORS.items():
        documented[code] = {"model": Error, "description": text}
    return documented
