"""What learns, from what, and how: adapters, their objective and optimiser, rewards, checkpoints.

`LoRAConfig` and `RLConfig` are what trainers take, and what users of `RLIntegratedServer` write.
"""

from dataclasses import dataclass
from typing import Literal

from mlx_parallm.config.algorithms import ALGORITHMS, CLIPPED, SCALINGS, RewardScaling, unscaled
from mlx_parallm.config.model_config import named_path
from mlx_parallm.config.options import check_at_least, check_positive, group, option, parse_bool, parse_list
from mlx_parallm.errors import ConfigError

KLEstimator = Literal["k1", "k2", "k3"]
ESTIMATORS = ("k1", "k2", "k3")
Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES = ("constant", "linear", "cosine")
Reference = Literal["initial", "base"]
REFERENCES = ("initial", "base")
ALL_LINEAR = "all-linear"  # among the layers to train: all of the blocks'
BUILT_IN_SCORERS = ("arithmetic", "format", "gsm8k", "length", "letters")  # that --environment may name
MIN_COMPARED = 5  # updates whose rewards are compared with those before, at least as many


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Which layers learn, and how finely."""

    rank: int = option(16, "rank of an adapter that is trained", name="lora_rank", parse=int)
    alpha: float = option(32.0, "scale of an adapter that is trained, times its rank", name="lora_alpha", parse=float)
    target_modules: tuple[str, ...] = option(
        ("q_proj", "v_proj"),
        "layers that a trained adapter changes, by the last part of their names, with commas; all-linear: all linear "
        "layers of the blocks; lm_head: the output layer, where the model has one of its own",
        name="lora_target_modules",
        parse=parse_list,
    )
    dora: bool = option(False, "train DoRA's magnitudes too", name="lora_dora", parse=parse_bool)
    dropout: float = option(
        0.0,
        "share of the inputs of a trained adapter that is left out at random in its updates",
        name="lora_dropout",
        parse=float,
    )
    layers: int | None = option(
        None, "train only the last so many blocks, which is faster (default: all)", name="lora_layers", parse=int
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rank")
        check_at_least(self, 0, "layers", "dropout")
        if self.dropout >= 1:
            raise ConfigError(f"lora_dropout must be below 1, not {self.dropout:g}")
        names = tuple(name for entry in self.target_modules for name in entry.split(",") if name)
        object.__setattr__(self, "target_modules", names)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its schedule, and the clipping before it."""

    learning_rate: float = option(5e-4, "learning rate of AdamW, as in TRL", parse=float)
    schedule: Schedule = option(
        "constant", "learning-rate schedule after the warm-up", name="lr_schedule", key="schedule", choices=SCHEDULES
    )
    warmup_steps: int = option(
        0, "updates over which the learning rate rises from 0, which the first of them has, as in TRL", parse=int
    )
    total_steps: int = option(
        1000,
        "updates at whose end the linear and cosine schedules have come to 0; mlx_parallm_train takes --steps, or the "
        "steps of all epochs (default: 1000)",
        parse=int,
    )
    weight_decay: float = option(0.0, "weight decay of AdamW", parse=float)
    max_grad_norm: float = option(1.0, "norm to which longer gradients are clipped", parse=float)

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule must be constant, linear or cosine, not {self.schedule!r}")
        check_at_least(self, 1, "total_steps")
        check_at_least(self, 0, "learning_rate", "warmup_steps", "weight_decay")
        check_positive(self, "max_grad_norm")


@dataclass(frozen=True)
class Objective:
    """What a policy is trained to do."""

    algorithm: str = option("grpo", "objective of a policy's updates", choices=tuple(ALGORITHMS))
    clip_low: float = option(
        0.2,
        "share by which the probability of a token (rloo, gspo: of a completion) may fall in an update",
        parse=float,
    )
    clip_high: float = option(
        0.2,
        "share by which the probability of a token (rloo, gspo: of a completion) may rise in an update",
        parse=float,
    )
    beta: float = option(0.0, "weight of the KL divergence to the reference (see --reference); 0: none", parse=float)
    dual_clip: float | None = option(
        10.0,
        "ratio above which a token of a bad completion is not pushed down any further, TRL's delta; above 1 + "
        "--clip-high; 0: no limit",
        parse=float,
    )
    reward_scaling: RewardScaling | None = option(
        None,
        "what rewards are divided by after their baseline: none, the standard deviation of their group, or of all of "
        f"the update (batch) (default: group; none with {', '.join(unscaled())})",
        choices=SCALINGS,
    )
    kl_estimator: KLEstimator = option(
        "k3", "estimator of the KL divergence that --beta weighs: k1, k2 or k3", choices=ESTIMATORS
    )
    kl_in_reward: bool = option(
        False,
        "subtract --beta times a completion's KL divergence to the reference from its reward, in place of a term of "
        "the loss, as TRL's RLOO does",
        parse=parse_bool,
    )
    entropy_bonus: float = option(
        0.0, "weight of the entropy of the policy, in nats per token, that is subtracted from the loss", parse=float
    )
    importance_cap: float | None = option(
        None,
        "truncated importance sampling: tokens are weighted by the ratio of the policy at the update's begin to the "
        "sampler, at most this, and clips look at what the update itself changes (default: off)",
        parse=float,
    )
    mask_truncated: bool = option(
        False,
        "learn nothing from completions that were cut off at their longest allowed length, TRL's "
        "mask_truncated_completions; their rewards still count in their group's mean",
        parse=parse_bool,
    )
    sapo_temperature_pos: float = option(1.0, "temperature of sapo's gate for good completions", parse=float)
    sapo_temperature_neg: float = option(1.05, "temperature of sapo's gate for bad completions", parse=float)
    # Left out are tokens whose ratio to the sampler's, or its inverse, is larger than the first of these, and
    # completions whose geometric mean of that (the larger of ratio and inverse, of each token) is larger than the
    # second.
    token_limit: float | None = option(
        None,
        "ratio between trainer's and sampler's probability, or its inverse, above which a token is left out",
        parse=float,
    )
    answer_limit: float | None = option(
        None,
        "geometric mean of those ratios over a completion's tokens above which the whole completion is left out",
        parse=float,
    )

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {self.algorithm!r}")
        if self.reward_scaling not in (None, *SCALINGS):
            raise ConfigError(f"reward_scaling must be none, group or batch, not {self.reward_scaling!r}")
        if self.kl_estimator not in ESTIMATORS:
            raise ConfigError(f"kl_estimator must be k1, k2 or k3, not {self.kl_estimator!r}")
        check_at_least(self, 0, "clip_low", "clip_high", "beta", "dual_clip", "entropy_bonus")
        check_positive(self, "importance_cap", "sapo_temperature_pos", "sapo_temperature_neg")
        clips = ALGORITHMS[self.algorithm].surrogate == CLIPPED
        if clips and self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            raise ConfigError(
                f"dual_clip must be above 1 + clip_high, {1 + self.clip_high:g}, and is {self.dual_clip:g}"
            )

    @property
    def divergence_in_loss(self) -> bool:
        return self.beta > 0 and not self.kl_in_reward


@dataclass(frozen=True, kw_only=True)
class UpdateConfig(OptimizerConfig):
    """An optimiser, and how its updates are cut into pieces beside serving."""

    batch_size: int = option(
        32,
        "trajectories or examples of a step of the optimiser, about; an update from more makes several steps",
        name="train_batch_size",
        key="batch_size",
        parse=int,
    )
    microstep_seconds: float = option(
        0.5,
        "seconds for which a piece of an update holds requests up, about (four times that while there are none)",
        parse=float,
    )
    microbatch_tokens: int = option(
        0, "tokens of a piece of an update; 0: as many as --microstep-seconds allows", parse=int
    )
    gradient_checkpointing: bool | None = option(
        None,
        "compute blocks twice in an update, to hold fewer activations (default: on a Mac, where memory for attention "
        "grows with the square of a text, and without --lora-dropout)",
        parse=parse_bool,
    )
    seed: int = option(0, "seed of all that is random in training", name="train_seed", key="seed", parse=int)

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        check_at_least(self, 1, "batch_size")
        check_at_least(self, 0, "microbatch_tokens")
        check_positive(self, "microstep_seconds")


@dataclass(frozen=True, kw_only=True)
class RLConfig(UpdateConfig, Objective):
    """How a policy learns."""

    epochs: int = option(
        1, "optimiser steps on one batch of trajectories", name="train_epochs", key="epochs", parse=int
    )
    max_kl: float = option(
        1.0,
        "nats per token by which an update may move the policy; a step that moves it further is halved, and refused "
        "where that does not help",
        parse=float,
    )
    max_kl_tokens: int = option(
        512,
        "tokens of an update's answers, at least, by which --max-kl is measured, where there are so many",
        parse=int,
    )
    max_kl_halvings: int = option(
        3, "times that a step over --max-kl is halved before the update is refused; 0: refused at once", parse=int
    )
    reference: Reference = option(
        "initial",
        "what the KL divergence is measured to; initial: the adapter that training begins with, by --init-adapter or "
        "--lora-path, or the model where it begins with none; base: always the model without an adapter",
        choices=REFERENCES,
    )
    max_length: int | None = (
        None  # for Dr. GRPO's weights; None: the most tokens that completions of the update could have
    )
    max_parameter_norm: float = 1e4

    def __post_init__(self) -> None:
        UpdateConfig.__post_init__(self)
        Objective.__post_init__(self)
        if self.reference not in REFERENCES:
            raise ConfigError(f"reference must be initial or base, not {self.reference!r}")
        check_at_least(self, 1, "epochs", "max_length")
        check_at_least(self, 1, "max_kl_tokens")
        check_at_least(self, 0, "max_kl_halvings")
        check_positive(self, "max_kl", "max_parameter_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarms:
    """What brings the last good version back; 0 or None: never."""

    kl: float | None = option(
        10.0,
        "KL divergence to the reference, in nats per token, above which the last good version is brought back; 0: off",
        name="alarm_kl",
        parse=float,
    )
    entropy: float | None = option(
        1e-3,
        "entropy of the policy, in nats per token, below which the last good version is brought back; 0: off",
        name="alarm_entropy",
        parse=float,
    )
    reward_drop: float | None = option(
        3.0,
        "fall of the median reward of five updates below that of the updates before, in robust standard deviations, "
        "from which the last good version is brought back; 0: off",
        name="alarm_reward_drop",
        parse=float,
    )
    reward_updates: int = option(
        50,
        "updates before the last five with which --alarm-reward-drop compares; fewer forget a change of scale sooner",
        name="alarm_reward_updates",
        parse=int,
    )

    def __post_init__(self) -> None:
        check_at_least(self, 0, "kl", "entropy", "reward_drop")
        check_at_least(self, MIN_COMPARED, "reward_updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsConfig:
    """What scores answers."""

    scoring_function: tuple[str, ...] = option(
        (), "NAME=module:function or NAME=file.py:function that requests may name; repeatable", parse=parse_list
    )
    scoring_batch_size: int = option(
        32, "most completions that are scored in one call of a scoring function", parse=int
    )
    scoring_timeout: float = option(30.0, "seconds that a call of a scoring function may take", parse=float)
    reward_model: tuple[str, ...] = option(
        (), "folder of a reward model that was trained here; repeatable as NAME=PATH", parse=parse_list
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "scoring_batch_size")
        check_at_least(self, 0, "scoring_timeout")

    def named_reward_models(self) -> dict[str, str]:
        """Name to folder for each reward model to load at start."""
        models: dict[str, str] = {}
        for name, path in map(named_path, self.reward_model):
            if name in models:
                raise ConfigError(f"two reward models are called {name!r}; give each its own NAME=PATH")
            models[name] = path
        return models


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    enable_rl_training: bool = option(False, "train an adapter on what is served", key="enabled", parse=parse_bool)
    train_adapter: tuple[str, ...] = option(
        ("policy",),
        "name of an adapter that is trained; repeatable, each learns from its own completions",
        parse=parse_list,
    )
    inference_share: float = option(
        0.7, "share of the engine's time for requests, while there are some and training has work too", parse=float
    )
    trajectory_buffer_size: int = option(1000, "most trajectories that may wait to be learnt from", parse=int)
    update_frequency: int = option(
        100, "trajectories that make an update; 0: updates only when one is asked for", parse=int
    )
    max_staleness: int | None = option(
        None, "versions by which a trajectory may be behind the policy (default: any number)", parse=int
    )
    atropos_url: str | None = option(None, "URL of an Atropos API to take trajectories from")
    environment: str | None = option(
        None,
        "what scores collected completions whose requests name no scoring function: gsm8k or another built-in scorer, "
        "which starts nothing; or an Atropos environment to start, as FILE.py or a module, with its own flags behind "
        "it, which needs --atropos-url",
    )
    rewards: RewardsConfig = group(RewardsConfig, "rewards", "rl_training")
    lora: LoRAConfig = group(LoRAConfig, "adapters that are trained", "model")
    rl: RLConfig = group(RLConfig, "updates", "rl_training")
    alarms: Alarms = group(Alarms, "alarms of training", "rl_training")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "trajectory_buffer_size")
        check_at_least(self, 0, "update_frequency", "max_staleness")
        if self.lora.dropout and self.rl.gradient_checkpointing:
            raise ConfigError(
                "lora_dropout and gradient_checkpointing exclude each other: blocks that are computed twice would "
                "leave out other inputs the second time"
            )
        if not 0 < self.inference_share <= 1:
            raise ConfigError(f"inference_share must be above 0 and at most 1, not {self.inference_share}")

    @property
    def built_in_scorer(self) -> str | None:
        """The scorer that --environment names, where that is no environment of Atropos."""
        return self.environment if self.environment in BUILT_IN_SCORERS else None

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that learn, the first first."""
        return [name for entry in self.train_adapter for name in entry.split(",") if name]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    checkpoint_dir: str = option("./checkpoints", "folder of training's checkpoints")
    checkpoint_interval: int = option(
        500, "updates between two checkpoints that stay, beside the one called latest", key="interval", parse=int
    )
    checkpoint_seconds: float = option(
        60.0,
        "seconds after a change of the training state until it is written to the checkpoint called latest, which a "
        "restart goes on from; it is always written on shutdown; 0: only then",
        key="seconds",
        parse=float,
    )
    keep_n_checkpoints: int = option(
        10, "checkpoints that stay; older ones are removed, but for those with a name", parse=int
    )
    resume: bool = option(True, "go on from the last checkpoint in --checkpoint-dir", parse=parse_bool)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "checkpoint_interval", "keep_n_checkpoints")
        check_at_least(self, 0, "checkpoint_seconds")
