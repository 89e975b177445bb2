"""Several engines behind one address."""

from dataclasses import dataclass

from mlx_parallm.config.options import check_at_least, option, parse_bool
from mlx_parallm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    replicas: int = option(
        1, "copies of the model that serve behind the one address; more than 1 needs the extra 'cluster'", parse=int
    )
    max_replicas: int | None = option(
        None,
        "copies of the model at most: one is added while more requests are in flight than --max-batch-size for each, "
        "and --replicas are the fewest (default: as many as --replicas)",
        parse=int,
    )
    scale_down_seconds: float = option(
        300.0, "seconds for which fewer replicas must have been enough before one that was added ends", parse=float
    )
    share_model: bool = option(
        False,
        "start a cluster that other machines can join with --connect-to; each brings one more replica",
        parse=parse_bool,
    )
    use_distributed: bool | None = option(
        None,
        "on: it is an error unless mlx.launch has started this process as one of several ranks; off: it serves "
        "alone whatever started it (default: as mlx.launch has started it)",
        other_keys=("use_distributed",),
        parse=parse_bool,
    )
    connect_to: str | None = option(
        None,
        "HOST:PORT of a server. mlx_parallm_serve: one that was started with --share-model, for which this machine "
        "runs replicas, with its options; its --admin-key is needed where it has keys. mlx_parallm_train --mode rl: "
        "any server, or replicas behind one address; it samples the rollouts and gets each version, this process "
        "learns and serves nothing, and sends --admin-key or --api-key (default: none)",
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "replicas")
        check_at_least(self, 0, "scale_down_seconds")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas must be at least replicas, which is {self.replicas}")
        if self.max_replicas is not None and (self.share_model or self.connect_to is not None):
            raise ConfigError(
                "max_replicas is for one machine: in a cluster each machine that joins brings its --replicas; "
                "packaging/ray-serve.yaml scales over machines"
            )
        if self.connect_to is not None:
            if self.share_model:
                raise ConfigError("give either --share-model, to start a cluster, or --connect-to, to join one")
            host, _, port = self.connect_to.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(f"connect_to must be HOST:PORT, not {self.connect_to!r}")

    @property
    def several(self) -> bool:
        """Whether engines run in processes of their own."""
        return self.most > 1 or self.share_model or self.connect_to is not None

    @property
    def most(self) -> int:
        """Replicas that there may be on this machine."""
        return self.replicas if self.max_replicas is None else self.max_replicas
