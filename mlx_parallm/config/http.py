"""Where the server listens, who may use it, and what it writes of that."""

from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.config.options import (
    check_at_least,
    check_finite,
    check_sampling_option,
    option,
    parse_bool,
    parse_bytes,
    parse_list,
)
from mlx_parallm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0: one that the system chooses", parse=int)
    api_key: str | None = option(None, "bearer token that every route but /health and /metrics asks for")
    admin_key: str | None = option(
        None, "bearer token for routes that change the server: adapters, training, models, pauses, caches"
    )
    named_key: tuple[str, ...] = option(
        (),
        "bearer token with a name, as NAME=KEY or NAME:ROLE=KEY; roles are user, trainer and admin; repeatable, in the "
        "environment with commas",
        parse=parse_list,
    )
    keys_file: str | None = option(
        None,
        "JSON, TOML or YAML file of named keys with roles and limits, as 'parallm keys' writes it; read anew when it "
        "changes, and on SIGHUP",
        aliases=("--api-keys-file",),
    )
    audit_log: str | None = option(
        None, "file that gets a JSON line for every call that changes the server: who, what, when; never a body"
    )
    tls_cert: str | None = option(None, "PEM file of the certificate chain to serve https with; needs --tls-key")
    tls_key: str | None = option(None, "PEM file of the certificate's private key, without a password")
    allow_sleep: bool = option(
        False,
        "let a Mac go to sleep while nobody touches it, although it serves or trains (default: caffeinate prevents it; "
        "of no effect elsewhere)",
        parse=parse_bool,
    )
    insecure: bool = option(False, "listen beyond this machine without any key", parse=parse_bool)
    allowed_host: tuple[str, ...] = option(
        (),
        "name that requests may address the server by; repeatable, * for any (default: those of this machine while "
        "--host is loopback, any name otherwise)",
        parse=parse_list,
    )
    cors_allow_origin: tuple[str, ...] = option(
        (), "origin that browsers may call from; repeatable, * for all", parse=parse_list
    )
    allowed_media_host: tuple[str, ...] = option(
        (),
        "host or host:port that image URLs may point to although its address is not public; repeatable",
        parse=parse_list,
    )
    allowed_local_media_path: str | None = option(
        None, "folder that file:// URLs of images may point into (default: they are refused)"
    )
    responses_dir: str | None = option(
        None,
        "folder that keeps completions of /v1/responses for requests that continue them, private to the user (default: "
        "responses in the user's data folder)",
    )
    responses_max_bytes: int = option(
        1_000_000_000,
        "most bytes of completions of /v1/responses that are kept, as 1GB; the longest unused go first; 0 keeps none",
        parse=parse_bytes,
    )
    max_body_size: int = option(32 << 20, "largest request body, in bytes or as 32MiB", parse=parse_bytes)
    exit_on_engine_failure: bool = option(
        True,
        "end the process with a non-zero status when the engine fails for good; --no-exit-on-engine-failure keeps it "
        "running with /health at 503",
        parse=parse_bool,
    )
    drain_timeout_seconds: float = option(
        30.0, "seconds that SIGTERM waits for running requests before it cuts them off", parse=float
    )
    unknown_fields: str = option(
        "warn",
        "request fields that nobody knows: ignore; warn, which names them in the header X-Parallm-Warning; or refuse, "
        "which is status 400",
        choices=("ignore", "warn", "refuse"),
    )
    log_level: str = option(
        "INFO", "least level of what is logged: DEBUG, INFO, WARNING, ERROR or CRITICAL", parse=str.upper
    )
    log_file: str | None = option(
        None,
        "file that the log is written to; at 10 MB the next one begins, and the last four are kept as FILE.1 to FILE.4 "
        "(default: standard error)",
    )
    log_json: bool = option(False, "write one JSON object per log line", parse=parse_bool)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_body_size")
        check_at_least(self, 0, "drain_timeout_seconds", "responses_max_bytes")
        check_finite(self, "drain_timeout_seconds")
        for name in ("api_key", "admin_key", "keys_file", "audit_log", "log_file", "tls_cert", "tls_key"):
            if (value := getattr(self, name)) is not None and not value.strip():
                raise ConfigError(f"{name} is empty: give it a value, or leave it out (unset PARALLM_{name.upper()})")
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} needs {missing} too: https takes a certificate and its key")
        folder = self.allowed_local_media_path
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise ConfigError(f"allowed_local_media_path is {folder!r}, and there is no such folder")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        if self.log_level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            raise ConfigError(f"log_level must be DEBUG, INFO, WARNING, ERROR or CRITICAL, not {self.log_level}")

    @property
    def has_keys(self) -> bool:
        return bool(self.named_key) or not (self.api_key is None and self.admin_key is None and self.keys_file is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How requests share the model."""

    max_batch_size: int = option(
        32,
        "most rows decoded together",
        aliases=("--max-batch",),
        other_keys=("max_batch_size", "completion_batch_size"),
        parse=int,
    )
    prefill_batch_size: int | None = option(
        None,
        "most prompts computed in one pass (default: as many as are of similar length)",
        other_keys=("prefill_batch_size",),
        parse=int,
    )
    scheduler: str = option(
        "continuous",
        "continuous: requests join at every step; default: they are gathered for --batch-timeout first",
        choices=("continuous", "default"),
    )
    batch_timeout: float = option(
        0.1,
        "seconds for which --scheduler default gathers requests (--flush-interval-ms: the same in milliseconds)",
        aliases=(("--flush-interval-ms", 0.001),),
        parse=float,
    )
    max_concurrent_streams: int = option(
        0, "most streams that run together, others wait in the queue; 0: no limit", parse=int
    )
    max_queue_size: int = option(
        128, "most requests that wait; further ones get status 429", other_keys=("max_queue_size",), parse=int
    )
    request_timeout_seconds: float = option(
        600.0,
        "seconds after which a request ends with an error and its row is freed; 0: never",
        other_keys=("request_timeout_s",),
        parse=float,
    )
    max_tokens: int | None = option(
        None,
        "tokens of a completion where a request does not say how many (default: chat as many as the context allows, "
        "completions 16)",
        other_keys=("default_max_tokens",),
        parse=int,
    )
    default_temperature: float | None = option(
        None,
        "temperature of requests that send none (default: the API's own, which is 1)",
        other_keys=("default_temperature",),
        parse=float,
    )
    default_top_p: float | None = option(
        None,
        "top_p of requests that send none (default: the API's own, which is 1)",
        other_keys=("default_top_p",),
        parse=float,
    )
    prefill_step_size: int = option(2048, "most prompt tokens computed between two decode steps", parse=int)
    profile: str | None = option(
        None,
        "file with the tuning to work by, as `tuning` in /server_info shows it: rows that are computed together, steps "
        "in flight, tokens that are read at once (default: measured at the first start, within 2 s, and kept)",
    )
    speculation: str = option(
        "auto",
        "draft the next tokens, and verify several in one step; answers stay the same. copy: what followed the last "
        "place where the text ended as it does now; auto: that, where it pays on this device (today on CPUs); off: "
        "nothing",
        choices=("auto", "copy", "off"),
    )
    exact: str = option(
        "auto",
        "give a request the same completion alone and in any batch, with its prompt cached or not, in 16 bits too. "
        "auto: where a step takes at most 5% longer for it on this machine, as the first start measures; always: at "
        "any cost, and where it can't be done, the start fails; off: never. Models in float32 are exact by themselves",
        choices=("auto", "always", "off"),
    )
    dedupe: bool = option(
        False, "compute identical deterministic requests that are in flight together only once", parse=parse_bool
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_batch_size", "prefill_step_size", "max_queue_size", "max_tokens")
        check_at_least(self, 1, "prefill_batch_size")
        check_sampling_option(self, "default_temperature", "temperature")
        check_sampling_option(self, "default_top_p", "top_p")
        check_at_least(self, 0, "batch_timeout", "request_timeout_seconds", "max_concurrent_streams")
