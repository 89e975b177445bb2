"""Assembles an engine: which parts there are, and which of them know each other.

`StartingEngine` calls `build` on the engine thread, once the model is loaded and has its share of the memory. Parts
come in three groups, each built from those before it: what needs no model, what computes, and what serves requests.
"""

from dataclasses import dataclass, field, replace

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.freed_memory import AllocatorCache
from mlx_parallm.devices.metal.token_cuts import cut_kernel
from mlx_parallm.devices.native.token_sampling import sample_kernel
from mlx_parallm.devices.profile import PROMPT_STEP, DeviceProfile
from mlx_parallm.engine.accounts import Accounts
from mlx_parallm.engine.background import Background
from mlx_parallm.engine.compute.batching import batch_cache, check_room, prefix_cache, warm_blocks, warm_up
from mlx_parallm.engine.compute.pass_contexts import PassContexts
from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.compute.sampling import SamplingKernels
from mlx_parallm.engine.compute.tuned import Tune, Tuned, check_exact
from mlx_parallm.engine.delivery import Delivery, Outbox, Recording
from mlx_parallm.engine.intake import Admission, Intake
from mlx_parallm.engine.live_requests import LiveRequests
from mlx_parallm.engine.pause import IdleState, Pause
from mlx_parallm.engine.pipeline import StepPipeline
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.prefix_lookup import PrefixLookup, SsdTransfers
from mlx_parallm.engine.ranks import DeviceParts, Ranks
from mlx_parallm.engine.recovery import Preemption, Recovery
from mlx_parallm.engine.scheduler import Limits, Scheduler
from mlx_parallm.engine.speculative.speculation import Speculation
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.kv.batch import BatchCache
from mlx_parallm.kv.prefix import Prefix
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.registry import Registry
from mlx_parallm.metrics import EngineMetrics, MemoryPlan
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.text.grammar import GrammarCompiler
from mlx_parallm.text.prompts import Prompts


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with room for adapters in its layers."""

    model: LanguageModel
    layout: Layout


@dataclass(frozen=True, slots=True)
class BaseParts:
    """The parts that an engine has before its model."""

    config: ServeConfig
    profile: DeviceProfile
    thread: EngineThread
    outbox: Outbox
    allocator_cache: AllocatorCache
    live: LiveRequests
    background: Background  # training
    predictions: Background  # models that predict
    metrics: EngineMetrics
    recording: Recording = field(default_factory=Recording)
    ranks: Ranks | None = None  # where the model is split over several processes
    tune: Tune | None = None


@dataclass(frozen=True, slots=True)
class ComputeParts:
    """The model and all that computes with it, and the scheduler that says what."""

    model: LanguageModel
    layout: Layout
    profile: DeviceProfile  # with what was measured
    memory: MemoryPlan
    adapters: Registry
    prefix: Prefix | None
    runner: Runner
    lookup: PrefixLookup
    scheduler: Scheduler
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A whole engine."""

    base: BaseParts
    compute: ComputeParts
    grammars: GrammarCompiler
    accounts: Accounts
    policies: Policies
    ssd_transfers: SsdTransfers | None
    delivery: Delivery
    pipeline: StepPipeline
    idle: IdleState
    pause: Pause
    preemption: Preemption
    recovery: Recovery
    intake: Intake

    def resize(self, plan: MemoryPlan) -> MemoryPlan:
        """Another share of the memory; returns what is used of it."""
        base = self.base
        prefix = self.compute.prefix
        self.compute.runner.cache.max_bytes = plan.rows
        if prefix is not None and base.config.cache.by_memory:
            prefix.set_max_bytes(plan.blocks)
        base.allocator_cache.allow(base.thread, plan.kept)
        used = replace(plan, blocks=0 if prefix is None else prefix.max_bytes)
        base.metrics.memory = used
        base.metrics.kv_bytes_limit = plan.rows
        self.accounts.gauge()
        return used


def build(base: BaseParts, loaded: LoadedModel, plan: MemoryPlan) -> EngineParts:
    """Builds and warms up an engine within the memory that `plan` gives it; raises where that can't work."""
    compute = _build_compute(base, loaded, plan)
    base = replace(base, profile=compute.profile)
    parts = _build_serving(base, compute)
    base.metrics.slots_total = base.config.batch.max_batch_size
    base.metrics.kv_bytes_limit = plan.rows
    base.metrics.memory = compute.memory
    compute.runner.precompute(Prompts(compute.model.tokenizer).common_prefix())
    parts.idle.enter()
    return parts


def _build_compute(base: BaseParts, loaded: LoadedModel, plan: MemoryPlan) -> ComputeParts:
    model = loaded.model
    layout = loaded.layout
    adapters = _registry(base, layout)
    parts = device_parts(base.config, base.profile, loaded, plan, split=base.ranks is not None, tune=base.tune)
    profile = parts.tuned.profile
    base.metrics.tuning = parts.tuned.as_json()
    if base.ranks is not None:
        parts = base.ranks.lead(parts, layout)
    cache = parts.cache
    prefix = parts.prefix
    runner = Runner(
        parts,
        model.vocab_size,
        before_wait=base.outbox.flush,
        round_prompts=profile.round_prompts,
        kernels=_sampling_kernels(profile, model.vocab_size),
        contexts=PassContexts(
            adapters, None if model.vision is None else model.vision.encoder, base.metrics.adapter_seconds.observe
        ),
    )
    lookup = PrefixLookup(prefix, runner)
    memory = replace(plan, blocks=0 if prefix is None else prefix.max_bytes)
    scheduler = Scheduler(
        _limits(base.config, profile, cache, prefix),
        cache.fits,
        look_up=lookup.look_up,
        release=lookup.release,
        shorten=lookup.shorten,
    )
    speculation = Speculation(cache, profile.drafts, round_up=profile.compiled)
    return ComputeParts(model, layout, profile, memory, adapters, prefix, runner, lookup, scheduler, speculation)


def device_parts(
    config: ServeConfig,
    profile: DeviceProfile,
    loaded: LoadedModel,
    plan: MemoryPlan,
    split: bool = False,
    tune: Tune | None = None,
) -> DeviceParts:
    """The forward pass, and the caches that are proven on the model. A rank that follows has no more than these.

    `split`: over ranks, which compute each pass together. `tune`: measures what the profile leaves open.
    """
    model = loaded.model
    layout = loaded.layout
    forward = Forward(model.module, layout.active, in_order=split)
    cache = batch_cache(model, forward, config.batch.max_batch_size, plan.rows, profile)
    check_room(cache, plan, model.context_length)
    tuned = Tuned(profile)
    if tune is not None and cache.method is not None:
        tuned = tune(model, forward, cache, profile)
        profile = tuned.profile
    check_exact(model, config, profile)
    warm_up(forward, layout, cache, model.vocab_size, profile)
    prefix = prefix_cache(model, cache, config, plan.blocks, profile)
    if layout.traced and prefix is not None and prefix.store is not None:
        warm_blocks(forward, cache, prefix, profile.chunk or PROMPT_STEP)
    return DeviceParts(forward, cache, prefix, tuned)


def _sampling_kernels(profile: DeviceProfile, vocab_size: int) -> SamplingKernels:
    device = this_device()
    return SamplingKernels(
        sample=sample_kernel() if device.native and not profile.compiled else None,
        cut=cut_kernel(vocab_size) if device.metal else None,
    )


def _registry(base: BaseParts, layout: Layout) -> Registry:
    return Registry(
        layout,
        base.config.adapters.max_loras,
        base.config.adapters.max_cpu_loras,
        base.config.adapters.max_lora_rank,
        run_between_steps=base.thread.run_between_steps,
        observe=base.metrics.adapter_seconds.observe,
    )


def _limits(config: ServeConfig, profile: DeviceProfile, cache: BatchCache, prefix: Prefix | None) -> Limits:
    return Limits(
        max_rows=config.batch.max_batch_size,
        max_streams=config.batch.max_concurrent_streams,
        step_tokens=min(config.batch.prefill_step_size, profile.prefill_step or config.batch.prefill_step_size),
        gather_seconds=config.batch.batch_timeout if config.batch.scheduler == "default" else 0.0,
        max_padding=profile.max_padding if cache.stages_many and not profile.chunk else None,
        chunk=profile.chunk,
        worth_waiting=max(64, profile.min_match),
        round_to=PROMPT_STEP if profile.round_prompts and cache.stages_many else 1,
        pass_tokens=profile.pass_tokens if prefix is not None and prefix.store is not None else 0,
        max_adapters=config.adapters.max_loras,
        max_prompts=config.batch.prefill_batch_size,
        rollout_rows=max(1, round(config.batch.max_batch_size * (1 - config.serving_share))),
    )


def _build_serving(base: BaseParts, compute: ComputeParts) -> EngineParts:
    thread = base.thread
    live = base.live
    outbox = base.outbox
    metrics = base.metrics
    runner = compute.runner
    scheduler = compute.scheduler
    lookup = compute.lookup
    adapters = compute.adapters
    prefix = compute.prefix
    ranks = base.ranks
    grammars = _grammars(compute.model)
    admission = Admission(compute.model, grammars, runner.cache.max_length, base.config.batch.max_batch_size)
    accounts = Accounts(metrics, scheduler, runner, prefix)
    policies = Policies(adapters, live, scheduler, runner, lookup.hash_blocks)
    ssd_transfers = _ssd_transfers(prefix, scheduler, thread)
    delivery = Delivery(outbox, live, scheduler, runner, policies, base.recording, metrics)
    pipeline = StepPipeline(runner, scheduler, accounts, delivery, outbox, metrics, base.profile.steps_in_flight)
    idle = IdleState(runner, accounts)
    preemption = Preemption(scheduler, runner, lookup, metrics, starts_over=bool(compute.profile.chunk))
    return EngineParts(
        base=base,
        compute=compute,
        grammars=grammars,
        accounts=accounts,
        policies=policies,
        ssd_transfers=ssd_transfers,
        delivery=delivery,
        pipeline=pipeline,
        idle=idle,
        pause=Pause(thread, scheduler, pipeline, delivery, idle),
        preemption=preemption,
        recovery=Recovery(
            thread, scheduler, pipeline, preemption, live, delivery, outbox, runner, adapters, prefix, metrics, ranks
        ),
        intake=Intake(
            thread,
            admission,
            adapters,
            base.recording,
            live,
            policies,
            lookup,
            scheduler,
            ssd_transfers,
            idle,
            metrics,
            base.config.batch.max_queue_size,
        ),
    )


def _grammars(model: LanguageModel) -> GrammarCompiler:
    return GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)


def _ssd_transfers(prefix: Prefix | None, scheduler: Scheduler, thread: EngineThread) -> SsdTransfers | None:
    if prefix is None or prefix.disk is None:
        return None
    return SsdTransfers(prefix, prefix.disk, scheduler, thread.inbox.put)
