"""Chooses how a model's rows are batched, and proves the choice on the model itself before it serves.

Called once by the engine after loading. Plain key-value caches go into slots; other kinds through mlx-lm's batch
caches; what can't be batched runs row by row. Each candidate decodes two rows of different length and must give the
logits that each row gives alone, within 5% of their norm; the first that does is used, so an architecture that
mishandles per-row offsets costs speed, never wrong tokens. That finds errors, not rounding: rows are exact in float32,
and in 16 bits as close as the device's kernels are for one row and for many. This also warms the kernels up.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_parallm.config import ServeConfig
from mlx_parallm.devices.cuda_attention import attend, rotate_and_attend
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.metal.slot_attention import SlotAttention
from mlx_parallm.devices.native.functions import slot_attention
from mlx_parallm.devices.profile import PROMPT_STEP, DeviceProfile
from mlx_parallm.engine.compute.runner import Runner
from mlx_parallm.engine.compute.sampling import History, Sampler
from mlx_parallm.engine.compute.tuned import Tuned
from mlx_parallm.engine.ranks import DeviceParts
from mlx_parallm.engine.rows import Job, Prefill, Row
from mlx_parallm.errors import MemoryLimitError, ModelLoadError
from mlx_parallm.kv import block_size
from mlx_parallm.kv.batch import Attend, BatchCache
from mlx_parallm.kv.block_store import BlockStore, Packing
from mlx_parallm.kv.disk import DiskTier
from mlx_parallm.kv.merged import MergedCache, SerialCache, state_arrays
from mlx_parallm.kv.prefix import BlockPrefix, Prefix
from mlx_parallm.kv.slot_layer import SlotMethod
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.kv.snapshots import SnapshotPrefix, can_be_restored
from mlx_parallm.lora.kernel import MOST_READ
from mlx_parallm.lora.layout import RANK_STEP, Layout
from mlx_parallm.metrics import MemoryPlan
from mlx_parallm.models.fingerprint import fingerprint
from mlx_parallm.models.forward import Forward
from mlx_parallm.models.language import LanguageModel
from mlx_parallm.models.memory import size_flag, size_text
from mlx_parallm.paths import user_cache
from mlx_parallm.sampling_params import SamplingParams

log = logging.getLogger(__name__)

WARM_UP_SECONDS = 25.0  # of prompts' shapes; what comes before takes a few
WARM_UP_TOKENS = 8192  # of one pass
PromptShape = tuple[int, int, int, int]  # prompts, tokens of each, of which so many are known, and so many computed
PROBE = ([3, 1, 4, 1, 5], [9, 2, 6])  # two short prompts; any ids do


def batch_cache(
    model: LanguageModel, forward: Forward, max_rows: int, max_bytes: int, profile: DeviceProfile
) -> BatchCache:
    for cache in _candidates(model, max_rows, max_bytes, profile):
        name = type(cache).__name__
        try:
            agrees = _probe(model, forward, cache)
        except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError) as error:
            log.debug("%s can't be used with %s: %s", name, model.name, error)
            continue
        if agrees:
            if not (profile.drafts and _verifies(model, forward, cache)):
                cache.verify = None
            if not cache.batches:
                log.warning("%s can't be batched: its rows are computed one by one", model.name)
            return cache
        log.debug("%s gives wrong logits in a %s", model.name, name)
    raise ModelLoadError(f"{model.name} gives other logits with its cache than without: it can't be served")


def check_room(cache: BatchCache, plan: MemoryPlan, context: int) -> None:
    """A budget that holds no row would refuse every prompt: better not to start."""
    needed = cache.smallest_bytes
    if plan.rows < needed:
        raise MemoryLimitError(
            f"{size_text(plan.rows)} for running rows is too little: one row of {min(256, context)} tokens takes "
            f"{size_text(needed)}. Give --kv-cache-memory {size_flag(needed)} or more"
            f"{f', or --memory-limit {size_flag(plan.limit + 2 * needed)}' if plan.limit else ''}"
        )


def warm_up(forward: Forward, layout: Layout, cache: BatchCache, vocab_size: int, profile: DeviceProfile) -> None:
    """Uses kernels once where they are built at their first use: no request should wait for that."""
    if not layout.traced:
        return
    begun = time.perf_counter()
    _warm_up_rows(
        Runner(DeviceParts(forward, cache, None, Tuned(profile)), vocab_size, lambda: None, profile.round_prompts)
    )
    for arrays in sampling_probes(vocab_size):
        mx.eval(arrays)
    if profile.round_prompts and cache.sides and this_device().plans_shapes:
        shapes = chunk_shapes(profile.chunk) if profile.chunk else prompt_shapes(cache.free, profile.match_step)
        warm_prompt_shapes(forward, cache, shapes)
    if cache.sides and cache.free >= 2:
        _try_adapters(forward, layout, cache)
    log.info("warmed up in %.1f s", time.perf_counter() - begun)


def sampling_probes(vocab_size: int) -> Iterator[list[mx.array]]:
    """Samples in every way that a request can ask for, of equal logits; gives what is to be computed."""
    everything = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={1: 1.0},
        min_tokens=2,
        logprobs=2,
        processed_logprobs=True,
    )
    for params in (everything, SamplingParams(temperature=0.8, top_k=20), SamplingParams(temperature=0.8, top_p=0.9)):
        rows = [Row(PROBE[0], params, 0, seed=0, max_tokens=8, stop_ids=frozenset({2})) for _ in range(2)]
        sampler = Sampler(rows, vocab_size)
        masks = mx.full((len(rows), -(-vocab_size // 32)), 0xFFFFFFFF, mx.uint32)  # a grammar that allows all
        history = History(rows) if sampler.penalized else None
        yield sampler(mx.zeros((len(rows), vocab_size)), [0, 1], history, masks).arrays()


def _warm_up_rows(runner: Runner) -> None:
    """Made-up prompts, sampled and greedy, the second while the first runs."""
    rows = []
    for temperature in (0.8, 0.0)[: runner.cache.free]:
        sampling = SamplingParams(temperature=temperature, logprobs=0, processed_logprobs=True)
        rows.append(Row(PROBE[0] * 8, sampling, 0, seed=0, max_tokens=8, stop_ids=frozenset()))
        job = Job(rows[-1:], rows[-1].prompt, 0, 0.0)
        runner.read(runner.prefill(Prefill([job], len(job.tokens))))
        for _ in range(2):
            runner.read(runner.decode(rows))
    for row in rows:
        runner.leave(row)
    runner.release_memory()


def warm_prompt_shapes(forward: Forward, cache: BatchCache, shapes: Iterable[PromptShape]) -> None:
    """Computes prompts of the commonest shapes, from their start and behind a cached prefix."""
    begun = time.perf_counter()
    for count, total, known, width in shapes:
        staged = cache.stage(count, total)
        if known:
            for layer, keys, values in zip(staged, cache.sides[::2], cache.sides[1::2], strict=True):
                before = [mx.zeros((count, side.heads, total, side.width), side.dtype) for side in (keys, values)]
                layer.restore(before[0], before[1], known)
        last = mx.zeros((count,), mx.int32)
        mx.eval(forward.at(mx.zeros((count, width), mx.int32), staged, last), state_arrays(staged))
        if time.perf_counter() - begun > WARM_UP_SECONDS:
            log.info("warming up took %.0f s; prompts of other shapes are slower at their first time", WARM_UP_SECONDS)
            return


def warm_blocks(forward: Forward, cache: BatchCache, prefix: Prefix, step: int) -> None:
    """Keeps made-up texts as blocks and reads them back, one and several at a time; then forgets them. Not where they
    have no room: what is never found costs nothing."""
    texts = [[token] * (2 * step + 1) for token in (3, 4)]
    if prefix.store is None or prefix.store.total < len(texts) * (len(texts[0]) // prefix.block_size + 1):
        return
    chains = [prefix.chain(tokens, "warm-up") for tokens in texts]
    for tokens, chain in zip(texts, chains, strict=True):
        staged = cache.stage(1, 3 * step)
        forward.at(mx.array([tokens]), staged, mx.array([len(tokens) - 1]))
        prefix.commit(staged, 0, chain, tokens)
    for numbers in ((0,), (0, 0), (0, 1)):
        matches = [prefix.match(chains[number], texts[number]) for number in numbers]
        staged = prefix.fill(cache.stage(len(numbers), 3 * step), matches)
        last = mx.zeros((len(numbers),), mx.int32)
        mx.eval(forward.at(mx.zeros((len(numbers), step), mx.int32), staged, last), state_arrays(staged))
        for match in matches:
            prefix.release(match)
    prefix.reset()


def chunk_shapes(chunk: int) -> Iterator[PromptShape]:
    """The passes of single prompts that are computed in chunks."""
    for total in (*range(PROMPT_STEP, 2 * chunk + 1, PROMPT_STEP), 3 * chunk, 4 * chunk):
        for known in range(0, total, chunk):
            yield 1, total, known, min(chunk, total - known)


def prompt_shapes(max_rows: int, step: int) -> Iterator[PromptShape]:
    """The commonest first."""
    heights = [1 << power for power in range(max_rows.bit_length()) if 1 << power <= max_rows]
    for longest in (2, 4, 8):
        for count in heights:
            for total in range(step, longest * step + 1, step):
                if longest > 2 and total <= longest // 2 * step:
                    continue  # it was among the shorter ones
                if count * total <= WARM_UP_TOKENS:
                    yield count, total, 0, total
                if total > step and count * step <= WARM_UP_TOKENS:
                    yield count, total, total - step, step


def _try_adapters(forward: Forward, layout: Layout, cache: BatchCache) -> None:
    """Adapters that change nothing."""
    one = layout.blank()
    other = layout.blank()
    for rows in ((one, one), (one, other), (one, None)):
        row_adapters = layout.stack([row for row in rows if row]).for_rows(rows)
        staged = cache.stage(len(rows), len(PROBE[0]))
        mx.eval(forward.at(mx.array([PROBE[0]] * 2), staged, mx.array([4, 4]), row_adapters))
        positions = cache.join(staged, [(number, len(PROBE[0])) for number in range(2)])
        by_position = dict(zip(positions, rows, strict=True))
        count = cache.positions
        placed = [by_position.get(position) for position in range(count + cache.padding(count))]
        row_adapters = layout.stack([row for row in placed if row]).for_rows(placed)
        mx.eval(cache.decode(forward, mx.zeros((count,), mx.int32), [len(PROBE[0])] * count, row_adapters))
        for position in positions:
            cache.leave(position)
        cache.compact(0)
    if layout.active.kernels.has_adder:  # prompts so long that MLX adds them
        length = MOST_READ // RANK_STEP
        row_adapters = layout.stack([one]).for_rows((one, one))
        mx.eval(forward.at(mx.zeros((2, length), mx.int32), cache.stage(2, length), mx.array([0, 0]), row_adapters))


def prefix_cache(
    model: LanguageModel, cache: BatchCache, config: ServeConfig, max_bytes: int, profile: DeviceProfile
) -> Prefix | None:
    """The prefix cache for a model, once its batch cache is proven: blocks where it runs in slots, else snapshots."""
    if config.cache.off:
        return None
    size = block_size.tokens_per_block(config.cache.block_size, model.context_length)
    if not cache.sides:
        fresh = partial(cache.stage, 1, 0)
        if config.cache.kv_bits is not None or not config.cache.by_memory:
            log.warning("%s keeps snapshots, not blocks: --kv-bits and --num-blocks mean nothing to it", model.name)
        identity = _identity(model, config, size, f"snapshots of mlx-lm {version('mlx-lm')}")
        disk = _disk(config, identity) if can_be_restored(fresh()) else None
        return SnapshotPrefix(fresh, size, identity, max_bytes, profile.min_match, disk)
    packing = Packing(config.cache.kv_bits, config.cache.kv_group_size)
    widths = {side.width for side in cache.sides}
    if config.cache.kv_bits is not None and any(width % config.cache.kv_group_size for width in widths):
        raise ModelLoadError(
            f"--kv-group-size {config.cache.kv_group_size} does not divide this model's heads of {widths}"
        )
    store = BlockStore(
        size,
        cache.sides,
        packing,
        max_bytes=max_bytes,
        blocks=config.cache.blocks(model.context_length, size),
        fused=profile.fused,
        ahead=profile.steps_in_flight > 0,
    )
    form = f"{packing} {store.host_shapes()}"
    if profile.chunk:  # what others have computed in other shapes differs in its last bits
        form += f" in chunks of {profile.chunk}, {profile.exact_rows} rows"
    identity = _identity(model, config, size, form)
    disk = _disk(config, identity)
    return BlockPrefix(store, size, identity, profile.min_match, disk, profile.match_step)


def _identity(model: LanguageModel, config: ServeConfig, size: int, form: str) -> str:
    """Whatever, beside the text, decides what is kept: files of another identity never match."""
    weights = fingerprint(model.module) if config.cache.ssd else model.source
    if model.vision is not None and config.cache.ssd:
        weights += model.vision.encoder.fingerprint()
    settings = json.dumps(model.config, sort_keys=True, default=str)  # RoPE, windows, whatever else is no weight
    return repr((settings, model.precision, weights, size, form))


def _disk(config: ServeConfig, identity: str) -> DiskTier | None:
    if not config.cache.ssd or config.cache.ssd_max_bytes == 0:
        return None
    folder = Path(config.cache.ssd_cache_dir).expanduser() if config.cache.ssd_cache_dir else user_cache() / "kv"
    disk = DiskTier(folder, identity, config.cache.ssd_max_bytes, config.cache.ssd_ttl_days * 86400)
    disk.start()
    return disk


def slot_cache(layers: int, max_rows: int, max_bytes: int, profile: DeviceProfile, mask_rank: int = 4) -> SlotCache:
    """Makes slots with the kernels that there are for the device."""
    kernel: Attend | None = None
    if profile.fused:
        kernel = attend
    elif this_device().native and not profile.compiled:
        kernel = slot_attention()
    written = SlotAttention() if this_device().metal and mask_rank == 4 else None
    method = SlotMethod(
        profile.view_step,
        profile.compiled,
        mask_rank,
        pass_rows=profile.exact_rows,
        in_place=profile.fused,
        attend=kernel,
        attend_written=written,
        rotate_and_attend=rotate_and_attend if profile.fused else None,
        slot_steps=profile.slot_steps,
    )
    return SlotCache(layers, max_rows, max_bytes, method)


def _candidates(model: LanguageModel, max_rows: int, max_bytes: int, profile: DeviceProfile) -> Iterator[BatchCache]:
    def fresh() -> list[Any]:
        return make_prompt_cache(model.module)

    caches = fresh()
    if all(type(cache) is KVCache for cache in caches):
        for mask_rank in (4, 5):  # a few models compute attention by hand, with grouped heads on an axis of their own
            yield slot_cache(len(caches), max_rows, max_bytes, profile, mask_rank)
    elif all(hasattr(cache, "merge") for cache in caches):
        yield MergedCache(fresh, max_rows, max_bytes)
    yield SerialCache(fresh, max_rows, max_bytes)


def _probe(model: LanguageModel, forward: Forward, cache: BatchCache) -> bool:
    """Returns whether a batch gives the logits that its rows give alone."""
    prompts = [[token % model.vocab_size for token in prompt] for prompt in PROBE[: cache.free]]
    _join(forward, cache, prompts)
    positions = range(cache.positions)[: len(prompts)]
    batched = _probe_decode(forward, cache, [len(prompt) for prompt in prompts])
    for position in positions:
        cache.leave(position)
    cache.expect(0)
    cache.compact(0)  # leaves the cache empty, and with its sizes known
    return all(_agrees(model, prompt, [7, 8], batched[row]) for row, prompt in enumerate(prompts))


def _verifies(model: LanguageModel, forward: Forward, cache: BatchCache) -> bool:
    """Returns whether tokens 7 and 8 after each prompt have the same logits computed in one step as one by one."""
    if cache.verify is None:
        return False
    prompts = [[token % model.vocab_size for token in prompt] for prompt in PROBE[: cache.free]]
    try:
        _join(forward, cache, prompts)
        count = len(prompts)
        free = cache.positions - count
        tokens = [7] * count + [0] * free + [8] * count
        lengths = [len(prompt) for prompt in prompts]
        lengths += [0] * free + [length + 1 for length in lengths]
        logits = cache.verify(forward, mx.array(tokens, mx.int32), lengths, range(count), None)
        mx.eval(logits)
        return all(
            _agrees(model, prompt, [7], logits[row]) and _agrees(model, prompt, [7, 8], logits[cache.positions + row])
            for row, prompt in enumerate(prompts)
        )
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError) as error:
        log.debug("%s can't verify drafts: %s", model.name, error)
        return False
    finally:
        cache.reset()


def _join(forward: Forward, cache: BatchCache, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        staged = cache.stage(1, len(prompt))
        forward.at(mx.array([prompt]), staged, mx.array([len(prompt) - 1]))
        cache.join(staged, [(0, len(prompt))])


def _agrees(model: LanguageModel, prompt: Sequence[int], tokens: Sequence[int], logits: mx.array) -> bool:
    """Returns whether these are a text's last logits, computed alone."""
    alone = model.module(mx.array([[*prompt, *tokens]]), cache=make_prompt_cache(model.module))[0, -1]
    alone = alone.astype(mx.float32)
    difference = mx.linalg.norm(logits.astype(mx.float32) - alone)
    return bool((difference <= 0.05 * mx.linalg.norm(alone)).item())


def _probe_decode(forward: Forward, cache: BatchCache, lengths: list[int]) -> mx.array:
    """Tokens 7 and 8 after each prompt, in two steps: logits (rows, V)."""
    for offset, token in enumerate((7, 8)):
        tokens = mx.full((cache.positions,), token, mx.int32)
        free = [0] * (cache.positions - len(lengths))
        logits = cache.decode(forward, tokens, [length + offset for length in lengths] + free)
        mx.eval(logits)
    return logits
