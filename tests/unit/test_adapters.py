"""Adapters: read from the files of mlx-lm and PEFT, checked, and added to each row as mlx-lm adds them to a model."""

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.activations import swiglu
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from safetensors.numpy import save

from mlx_parallm.devices.cuda_attention import HeadNorms, RopeParams
from mlx_parallm.devices.device import this_device
from mlx_parallm.devices.native.products import adapted_products, low_rank_adder
from mlx_parallm.engine.compute.patch import add_hooks, fuse_blocks
from mlx_parallm.kv.slot_layer import SlotMethod
from mlx_parallm.kv.slots import SlotCache
from mlx_parallm.lora import kernel
from mlx_parallm.lora.adapter import Adapter, AdapterError, Part, Target, check_fit, check_name, with_paths_of
from mlx_parallm.lora.adapter_files import from_peft, parse, parse_config, read_folder, usual_config
from mlx_parallm.lora.hooks import AdapterKernels, JointKernels
from mlx_parallm.lora.joint_products import BY_OPERATIONS
from mlx_parallm.lora.kernel_check import adds_right, checked_adder
from mlx_parallm.lora.layout import Layout
from mlx_parallm.lora.row_adapters import BASE, AdapterStack, GroupedLoRA, Resident, RowAdapters, StackedLoRA, width_of
from mlx_parallm.models.forward import Forward
from tests.tiny import tiny

LIMIT = 1 << 24
ATTENTION = ["self_attn.q_proj", "self_attn.v_proj"]
ALL = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
ADAPTERS: dict[str, dict[str, Any]] = {
    "few": {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0, "keys": ATTENTION}},
    "all": {"fine_tune_type": "lora", "lora_parameters": {"rank": 16, "scale": 0.5, "keys": ALL}},
    "dora": {
        "fine_tune_type": "dora",
        "lora_parameters": {"rank": 8, "scale": 1.5, "keys": [*ATTENTION, "mlp.up_proj"]},
    },
    "all-dora": {"fine_tune_type": "dora", "lora_parameters": {"rank": 4, "scale": 1.0, "keys": ALL}},
    "embedding": {
        "fine_tune_type": "lora",
        "lora_parameters": {"rank": 3, "scale": 1.0, "keys": ["model.embed_tokens"]},
    },
    "embedding-dora": {
        "fine_tune_type": "dora",
        "lora_parameters": {"rank": 5, "scale": 1.0, "keys": ["model.embed_tokens", "lm_head"]},
    },
}


def base(bits: int | None = None, **changes: Any) -> nn.Module:
    module = tiny(**changes).module
    if bits:
        nn.quantize(module, group_size=32, bits=bits, class_predicate=lambda _, layer: isinstance(layer, nn.Linear))
    return module


def written(folder: Path, name: str, **changes: Any) -> Path:
    """A random adapter in mlx-lm's format, made by mlx-lm's own layers."""
    config = {"num_layers": 2, **ADAPTERS[name]}
    config["lora_parameters"] = {"dropout": 0.0, **config["lora_parameters"]}
    module = base(**changes)
    linear_to_lora_layers(module, 2, config["lora_parameters"], use_dora=config["fine_tune_type"] == "dora")
    random = np.random.default_rng(len(name))
    weights = {
        path: 0.2 * random.standard_normal(array.shape).astype(np.float32)
        for path, array in tree_flatten(module.parameters())
        if path.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
    }
    lengths = {
        path: np.array(array) * random.uniform(0.5, 1.5, array.shape).astype(np.float32)
        for path, array in tree_flatten(module.parameters())
        if path.endswith(".m")
    }
    target = folder / name
    target.mkdir()
    (target / "adapter_config.json").write_text(json.dumps(config))
    (target / "adapters.safetensors").write_bytes(save(weights | lengths))
    return target


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [12, 1])
@pytest.mark.parametrize("way", ["apart", "in the product", "side by side", "by a kernel", "jointly"])
def test_rows_with_different_adapters_equal_models_with_them(
    tmp_path: Path, bits: int | None, tied: bool, length: int, way: str
) -> None:
    changes = {"bits": bits, "tie_word_embeddings": tied}
    names = [name for name in ADAPTERS if not (tied and name == "embedding-dora")]
    folders = {name: written(tmp_path, name, **changes) for name in names}
    tokens = mx.random.randint(3, 250, (8, length), key=mx.random.key(1))
    expected: dict[str | None, mx.array] = {None: base(**changes)(tokens)}
    for name, folder in folders.items():
        expected[name] = load_adapters(base(**changes), str(folder))(tokens)
        assert not mx.allclose(expected[name], expected[None], atol=0.1)

    module = base(**changes)
    by_hand = AdapterKernels(
        add=low_rank_adder() if way == "apart" else added_by_hand if way == "by a kernel" else None,
        multiply=adapted_products() if way == "in the product" else None,
    )
    traced = way in ("side by side", "by a kernel", "jointly")
    layout = with_adapters(module, BY_OPERATIONS if way == "jointly" else by_hand, traced=traced)
    residents = {name: layout.place(layout.pack(read(folder, layout))) for name, folder in folders.items()}
    assert mx.allclose(module(tokens), expected[None], atol=1e-5 if way == "in the product" else 0)
    mixtures: list[list[str | None]] = [
        [None, *names, None, *names][:8],
        [names[1]] * 8,
        [names[2], None] * 4,
        [names[0], names[2], names[2], names[3]] * 2,
    ]
    for rows in mixtures:
        chosen = [residents[name] if name else None for name in rows]
        layout.active.row_adapters = chosen_by(layout, chosen, way)
        found = module(tokens)
        for row, name in enumerate(rows):
            assert mx.allclose(found[row], expected[name][row], atol=2e-4), f"row {row}: {name} among {rows}"
    layout.active.row_adapters = BASE
    assert mx.allclose(module(tokens), expected[None], atol=1e-5 if way == "in the product" else 0)


def with_adapters(module: nn.Module, kernels: AdapterKernels, traced: bool = False) -> Layout:
    """As the engine does it, with these kernels."""
    layout = Layout(module, traced)
    layout.active.kernels = kernels
    add_hooks(layout)
    fuse_blocks(module, kernels)
    return layout


def chosen_by(layout: Layout, rows: Sequence[Resident | None], way: str) -> RowAdapters:
    if way in ("apart", "in the product"):
        return GroupedLoRA(rows)
    return layout.stack([row for row in rows if row]).for_rows(rows)


def test_layers_of_the_same_inputs_are_added_to_at_once(tmp_path: Path) -> None:
    """As a GPU does it: one kernel for q, k and v."""
    folders = {name: written(tmp_path, name) for name in ("all", "few")}
    tokens = mx.random.randint(3, 250, (4, 1), key=mx.random.key(1))
    expected = {name: load_adapters(base(), str(folder))(tokens) for name, folder in folders.items()}
    module = base()
    calls: list[list[int]] = []

    def add(x: mx.array, layers: Sequence[Any], row_adapters: StackedLoRA) -> list[mx.array]:
        calls.append([y.shape[-1] for y, *_ in layers])
        return added_by_hand(x, layers, row_adapters)

    layout = with_adapters(module, AdapterKernels(add=add), traced=True)
    residents = {name: layout.place(layout.pack(read(folder, layout))) for name, folder in folders.items()}
    for rows in (["all", "few", "few", "all"], ["few"] * 4):
        chosen = [residents[name] for name in rows]
        stack = AdapterStack(tuple(dict.fromkeys(chosen)))
        columns = next(iter(stack.groups.values()))[0].shape[1]
        assert columns & (columns - 1) == 0, "few widths, since each is traced"
        layout.active.row_adapters = stack.for_rows(chosen)
        calls.clear()
        found = module(tokens)
        for row, name in enumerate(rows):
            assert mx.allclose(found[row], expected[name][row], atol=2e-4)
        assert len(calls) == (4 if "all" in rows else 1) * len(module.layers)
        assert max(map(len, calls)) == (3 if "all" in rows else 2)


def random_adapter(layout: Layout, names: tuple[str, ...], seed: int, rank: int = 8, size: float = 0.1) -> Adapter:
    random = np.random.default_rng(seed)
    return Adapter(
        {
            path: Part(
                size * random.standard_normal((rank, target.size)).astype(np.float32),
                size * random.standard_normal((target.out_features, rank)).astype(np.float32),
            )
            for path, target in layout.targets.items()
            if path.endswith(names)
        }
    )


def added_by_hand(x: mx.array, layers: Sequence[Any], row_adapters: StackedLoRA) -> list[mx.array]:
    """What the kernel gives."""
    assert row_adapters.spans is not None
    added = [y for y, *_ in layers]
    for row, (begin, rank) in enumerate(row_adapters.spans.tolist()):
        for i, (_, group, number) in enumerate(layers):
            a, b, _ = row_adapters.groups[group]
            own = x[row] @ a[number, begin : begin + rank].T @ b[number, begin : begin + rank]
            added[i] = added[i] + mx.where(mx.arange(len(x))[:, None, None] == row, own.astype(x.dtype), 0)
    return added


def rotated_and_attended(
    y: mx.array,
    heads: int,
    keys: mx.array,
    values: mx.array,
    offsets: mx.array,
    rope: RopeParams,
    norms: HeadNorms | None,
    scale: float,
) -> mx.array:
    """What the kernel gives, and writes."""
    rows, shared, capacity, width = keys.shape
    parts = mx.split(y, [heads * width, (heads + shared) * width], axis=1)
    queries, new_keys, new_values = (part.reshape(rows, -1, 1, width) for part in parts)
    if norms is not None:
        queries = mx.fast.rms_norm(queries, norms.queries, norms.eps)
        new_keys = mx.fast.rms_norm(new_keys, norms.keys, norms.eps)
    angles = (offsets[:, None] * (mx.power(2.0, rope.inv_freq) if rope.in_log2 else rope.inv_freq))[:, None, None]
    cos, sin = mx.cos(angles), mx.sin(angles)  # (B, 1, 1, half)

    def rotated(heads: mx.array) -> mx.array:
        one, other = mx.split(heads, 2, axis=-1)
        return mx.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)

    place = mx.arange(rows)[:, None], mx.arange(shared), offsets[:, None]
    keys[place] = rotated(new_keys)[:, :, 0]
    values[place] = new_values[:, :, 0]
    mask = (mx.arange(capacity) <= offsets[:, None])[:, None, None]
    attended = mx.fast.scaled_dot_product_attention(rotated(queries), keys, values, scale=scale, mask=mask)
    return attended.reshape(rows, -1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2", "qwen3", "gemma3"])
def test_blocks_of_few_kernels(kind: str, compiled: bool) -> None:
    """As on CUDA: products of layers side by side, RoPE and attention in one kernel, the residual in a product."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    plain, fused = ((tiny("llama", rope_scaling=scaling) if kind == "llama3" else tiny(kind)).module for _ in range(2))
    counts = {"add": 0, "gate": 0, "attend": 0}

    def add(
        x: mx.array, y: mx.array, places: Sequence[Any], out_features: Sequence[int], row_adapters: StackedLoRA
    ) -> mx.array | None:
        counts["add"] += 1
        parts = mx.split(y, np.cumsum(out_features)[:-1].tolist(), axis=2)
        return mx.concatenate(
            by_hand(x, [(part, *place) for part, place in zip(parts, places, strict=True)], row_adapters), axis=2
        )

    def gate(y: mx.array) -> mx.array | None:
        counts["gate"] += 1
        return swiglu(*mx.split(y, 2, axis=1))

    def attend(*given: Any) -> mx.array | None:
        counts["attend"] += 1
        return rotated_and_attended(*given)

    def by_hand(x: mx.array, layers: Sequence[Any], row_adapters: StackedLoRA) -> list[mx.array]:
        return [row_adapters.add_to_linear(g, n, x, y, None) if row_adapters.has(g) else y for y, g, n in layers]

    kernels = AdapterKernels(add=by_hand, joint=JointKernels(add, gate))
    known = dict(tree_flatten(plain.parameters()))
    layout = with_adapters(plain, AdapterKernels(), traced=True)
    fused_layout = with_adapters(fused, kernels, traced=True)
    mixtures = []
    for names in (ATTENTION, ALL, ["mlp.up_proj", "mlp.down_proj"]):
        one, other = (layout.place(layout.pack(random_adapter(layout, tuple(names), seed))) for seed in range(2))
        mixtures += [
            AdapterStack(members).for_rows(rows, masked=True)
            for members, rows in (((one,), [one] * 4), ((other, one), [other, None, one, one]))
        ]

    def outputs(module: nn.Module, layout: Layout) -> list[mx.array]:
        """Two steps behind prompts, for the base and each mixture."""
        forward, found = Forward(module, layout.active), []
        prompts = mx.random.randint(3, 90, (4, 20), key=mx.random.key(4))
        lengths = [20, 10, 15, 3]
        for row_adapters in (None, *mixtures):
            method = SlotMethod(32, compiled=compiled, rotate_and_attend=attend if module is fused else None)
            cache = SlotCache(len(module.layers), 4, 1 << 30, method)
            staged = cache.stage(4, 20)
            mx.eval(forward.at(prompts, staged, mx.array(lengths) - 1, row_adapters))
            cache.join(staged, list(enumerate(lengths)))
            for step in range(2):
                tokens = mx.array([5, 6, 7, 8]) + step
                found.append(cache.decode(forward, tokens, [length + step for length in lengths], row_adapters))
                mx.eval(found[-1])
        return found

    expected = outputs(plain, layout)
    for one, other in zip(outputs(fused, fused_layout), expected, strict=True):
        assert mx.allclose(one, other, atol=1e-4 if this_device().kind == "cpu" else 0.1)  # CUDA's products are rounder
    assert [bool(count) for count in counts.values()] == [kind != "gemma3"] * 3
    assert [name for name, weight in tree_flatten(fused.parameters()) if weight.shape != known[name].shape] == []
    assert all(mx.array_equal(weight, known[name]) for name, weight in tree_flatten(fused.parameters()))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_kernels_trial_knows_right_from_wrong(dtype: mx.Dtype) -> None:
    def wrong(x: mx.array, layers: Sequence[Any], row_adapters: StackedLoRA) -> list[mx.array]:
        return [y * (1 + mx.arange(2)[:, None, None]).astype(dtype) for y in added_by_hand(x, layers, row_adapters)]

    assert adds_right(dtype, [32, 64], added_by_hand)
    assert not adds_right(dtype, [32, 64], wrong)
    assert not adds_right(dtype, [32], lambda x, layers, row_adapters: [y for y, *_ in layers])


@pytest.mark.skipif(this_device().kind != "cuda", reason="needs CUDA")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_kernel_adds_each_rows_own(count: int, dtype: mx.Dtype) -> None:
    assert checked_adder(dtype) is not None
    rows, tokens, size, columns = 48, 2 if count == 2 else 1, 576, 128
    x = mx.random.normal((rows, tokens, size)).astype(dtype)
    parts = [
        (
            mx.random.normal((rows, tokens, lines)).astype(dtype),
            (0.05 * mx.random.normal((3, columns, size))).astype(dtype),
            (0.05 * mx.random.normal((3, columns, lines))).astype(dtype),
            number,
        )
        for number, lines in zip(range(count), (1536, 192, 8), strict=False)
    ]
    spans = [(0, 0), (0, 8), (8, 64), (72, 56), (120, 8)] * rows
    groups = {i: (a, b, None) for i, (_, a, b, _) in enumerate(parts)}
    row_adapters = StackedLoRA(groups, spans=mx.array(spans[:rows], mx.int32), max_rank=64)
    added = kernel.add_adapters(x, [(y, i, number) for i, (y, _, _, number) in enumerate(parts)], row_adapters)
    assert added is not None
    for (y, a, b, number), found in zip(parts, added, strict=True):
        for row, (begin, rank) in enumerate(spans[:rows]):
            own = slice(begin, begin + rank)
            parts_of_row = (x[row], a[number, own], b[number, own], y[row], found[row])
            # NumPy's products: MLX's own on CUDA are in fewer bits than float32 has.
            given, thin, back, before, after = (np.array(side.astype(mx.float32)) for side in parts_of_row)
            bound = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}[dtype]
            assert np.abs(after - before - given @ thin.T @ back).max() < bound


def test_long_prompts_are_left_to_mlx() -> None:
    a, b = mx.zeros((2, 8, 64)), mx.zeros((2, 8, 32))
    most = kernel.MOST_READ // 8 // 2
    for tokens, max_rank, left in (
        (most + 1, 8, True),
        (most, 16, True),
        (1, kernel.MAX_RANK + 1, True),
        (1, 8, False),
    ):
        row_adapters = StackedLoRA({0: (a, b, None)}, spans=mx.zeros((2, 2), mx.int32), max_rank=max_rank)
        x, y = mx.zeros((2, tokens, 64)), mx.zeros((2, tokens, 32))
        assert kernel._suits(x, y, [32], row_adapters) != left
    one, other = (StackedLoRA({0: (a, b, None)}, max_rank=rank) for rank in (8, 64))
    assert one.form == other.form, "a trace is for both"


def read(folder: Path, layout: Layout) -> Adapter:
    adapter = read_folder(folder, LIMIT)[0]
    check_fit(adapter, layout.targets, 64)
    return adapter


PATHS = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qv"]


def peft_files(**changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    layout = Layout(base())
    random = np.random.default_rng(3)
    weights = {}
    for path in PATHS:
        target = layout.targets[path]
        weights[f"base_model.model.{path}.lora_A.weight"] = random.standard_normal((4, target.size)).astype(np.float32)
        weights[f"base_model.model.{path}.lora_B.weight"] = random.standard_normal((target.out_features, 4)).astype(
            np.float32
        )
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 12, **changes}, weights


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6.0),
        ({"alpha_pattern": {"q_proj": 4}}, 1.0),
        ({"alpha_pattern": {r"model\.layers\.0\..*q_proj": 8}}, 2.0),
        ({"alpha_pattern": {"v_proj": 4}}, 3.0),
    ],
)
def test_peft_and_mlx_lm_say_the_same(changes: dict[str, Any], scale: float) -> None:
    config, weights = peft_files(**changes)
    path = PATHS[0]
    part = parse(config, save(weights), LIMIT).parts[path]
    a, b = (weights[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
    assert np.allclose(part.b @ part.a, scale * b @ a, atol=1e-4)
    same = {f"{path}.lora_a": a.T.copy(), f"{path}.lora_b": b.T.copy()}
    other = parse({"lora_parameters": {"scale": scale}}, save(same), LIMIT).parts[path]
    assert np.allclose(part.a, other.a)
    assert np.allclose(part.b, other.b, atol=1e-5)


def test_weights_without_a_config_get_one_of_their_rank_and_a_scale_of_one() -> None:
    _, weights = peft_files()
    config = usual_config(save(weights), LIMIT)
    a, b = (weights[f"base_model.model.{PATHS[0]}.lora_{side}.weight"] for side in "AB")
    part = parse(config, save(weights), LIMIT).parts[PATHS[0]]
    assert np.allclose(part.b @ part.a, b @ a, atol=1e-4)
    fewer = {name: (array[:3] if "lora_A" in name else array[:, :3].copy()) for name, array in weights.items()}
    with pytest.raises(AdapterError, match=r"says r = 4, and .* has rank 3"):  # the next version, under the same config
        parse(config, save(fewer), LIMIT)
    first = f"base_model.model.{PATHS[0]}"
    mixed = weights | {name: array for name, array in fewer.items() if name.startswith(first)}
    with pytest.raises(AdapterError, match="several ranks"):
        usual_config(save(mixed), LIMIT)
    plain = {f"{PATHS[0]}.lora_a": a.T.copy(), f"{PATHS[0]}.lora_b": b.T.copy()}
    config = usual_config(save(plain), LIMIT)
    assert config == {"fine_tune_type": "lora", "lora_parameters": {"scale": 1.0}}, "as mlx-lm writes it"
    part = parse(config, save(plain), LIMIT).parts[PATHS[0]]
    assert np.allclose(part.b @ part.a, b @ a, atol=1e-4)


GOLDEN = Path(__file__).parent.parent / "golden"
GOLD = json.loads((GOLDEN / "peft.json").read_text())


@pytest.mark.parametrize("name", list(GOLD["logits"]))
def test_pefts_files_give_what_peft_gives(name: str) -> None:
    """Numbers that PEFT computed with torch, once; tests/golden/make_peft.py says how."""
    module = base()
    layout = with_adapters(module, AdapterKernels(add=low_rank_adder()))
    if name != "base":
        resident = layout.place(layout.pack(read(GOLDEN / f"peft_{name}", layout)))
        rows = [resident] * len(GOLD["tokens"])
        layout.active.row_adapters = GroupedLoRA(rows)
    found = module(mx.array(GOLD["tokens"]))[:, -1]
    assert mx.allclose(found, mx.array(GOLD["logits"][name]), atol=1e-4)


def test_embeddings_lie_the_other_way_round_in_peft() -> None:
    random = np.random.default_rng(3)
    a, b = random.standard_normal((4, 284)).astype(np.float32), random.standard_normal((64, 4)).astype(np.float32)
    stem = "base_model.model.model.embed_tokens.lora_embedding"
    adapter = parse({"peft_type": "LORA", "lora_alpha": 8}, save({f"{stem}_A": a, f"{stem}_B": b}), LIMIT)
    layout = Layout(base())
    check_fit(adapter, layout.targets, 8)
    part = adapter.parts["model.embed_tokens"]
    assert np.allclose(part.b @ part.a, 2 * a.T @ b.T, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, "bfloat16"])
def test_every_precision_is_read(dtype: Any) -> None:
    config, weights = peft_files()
    if dtype == "bfloat16":
        arrays = {name: mx.array(array).astype(mx.bfloat16) for name, array in weights.items()}
        data = safetensors_of(arrays)
    else:
        data = save({name: array.astype(dtype) for name, array in weights.items()})
    part = parse(config, data, LIMIT).parts[PATHS[0]]
    assert part.a.dtype == np.float32
    assert np.allclose(part.a, weights[f"base_model.model.{PATHS[0]}.lora_A.weight"], rtol=0.01)


def safetensors_of(arrays: dict[str, mx.array]) -> bytes:
    header: dict[str, Any] = {}
    body = b""
    for name, array in arrays.items():
        data = np.array(array.view(mx.uint16)).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


def test_npz(tmp_path: Path) -> None:
    arrays = {f"{PATHS[0]}.lora_a": np.ones((64, 2), np.float32), f"{PATHS[0]}.lora_b": np.ones((2, 64), np.float32)}
    np.savez(tmp_path / "adapters.npz", **arrays)
    (tmp_path / "adapter_config.json").write_text('{"lora_parameters": {"scale": 3}}')
    assert read_folder(tmp_path, LIMIT)[0].parts[PATHS[0]].b.max() == 3


def zipped(name: str, data: bytes = b"a") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def array_of(header: str) -> bytes:
    """An npz file of one array with this header, and few bytes."""
    return zipped(
        "a.lora_a.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)
    )


def bad_files() -> list[tuple[str, dict[str, Any], bytes, str]]:
    config, weights = peft_files()
    sound = save(weights)
    first = f"base_model.model.{PATHS[0]}.lora_A.weight"
    pickled = pickle.dumps(weights)
    huge = json.dumps({"x": {"dtype": "F32", "shape": [2500000000], "data_offsets": [0, 10000000000]}}).encode()
    nan = {**weights, first: np.full_like(weights[first], np.nan)}
    return [
        ("truncated", config, sound[: len(sound) // 2], "not a sound safetensors"),
        ("empty", config, b"", "not a sound safetensors"),
        ("pickle", config, pickled, "not a sound safetensors"),
        ("10 GB header", config, len(huge).to_bytes(8, "little") + huge, "not a sound safetensors"),
        ("long header", config, (1 << 40).to_bytes(8, "little") + huge, "not a sound safetensors"),
        ("zip", config, b"PK\x03\x04" + bytes(100), "not a sound npz file: File is not a zip file"),
        ("integers", config, save({first: np.ones((4, 64), np.int32)}), "must be floating point"),
        ("too large", config, bytes(LIMIT + 1), "at most"),
        ("half a pair", config, save({first: weights[first]}), "not both lora_A and lora_B"),
        ("foreign", config, save({"model.norm.weight": np.ones(3, np.float32)}), "not a weight of an adapter"),
        ("NaN", config, save(nan), "not finite"),
        ("other shape", config, save({**weights, first: np.ones((4, 32), np.float32)}), "the model's has 64 × 64"),
        ("other layer", config, save(renamed(weights, "q_proj", "x_proj")), "no layer model.layers.0.self_attn.x_proj"),
        ("ranks apart", config, save({**weights, first: np.ones((3, 64), np.float32)}), "no pair of matrices"),
        ("no weights", config, save({}), "no adapter weight"),
        ("no LoRA", {"peft_type": "IA3"}, sound, "only LORA"),
        ("more than LoRA", {**config, "modules_to_save": ["lm_head"]}, sound, "modules_to_save"),
        ("full", {"fine_tune_type": "full"}, sound, "only lora and dora"),
        ("no scale", {"lora_parameters": {"rank": 3}}, sound, "lora_parameters.scale"),
        ("alpha", {**config, "lora_alpha": "much"}, sound, "lora_alpha is not a number"),
        ("pattern", {**config, "alpha_pattern": {"(": 3}}, sound, "alpha_pattern can't be used"),
        ("look-ahead", {**config, "alpha_pattern": {"(?=q)": 3}}, sound, "alpha_pattern can't be used"),
        ("large pattern", {**config, "alpha_pattern": {"((a{99}){99}){99}": 3}}, sound, "alpha_pattern can't be used"),
        ("no text", {**config, "alpha_pattern": {"\ud800": 4}}, sound, "is no text"),
        ("huge array", config, array_of("{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 40,)}"), "npz file"),
        (
            "huge shape",
            config,
            array_of("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}"),
            "an array of shape",
        ),
        ("no header", config, array_of("{("), "not a sound npz"),
        ("odd header", config, array_of("{[]: 1}"), "not a sound npz"),
        ("mixed header", config, array_of("{1: 2, 'a': 3}"), "not a sound npz"),
        ("deep header", config, array_of("-" * 9000 + "1"), "not a sound npz"),
        ("deeper header", config, array_of("(" * 4000), "not a sound npz"),
        ("no array in it", config, zipped("a.txt"), "'a.txt', which is no array"),
        ("rank", {**config, "r": 8}, sound, "config says r = 8, and .* has rank 4"),
        ("rank of a layer", {**config, "rank_pattern": {"q_proj": 2}}, sound, "says r = 2, and .* has rank 4"),
        ("no rank", {**config, "r": "many"}, sound, "says r = 'many'"),
    ]


@pytest.mark.parametrize(
    "parameters", [None, [], {}, {"scale": None}, {"scale": "2"}, {"scale": [2]}, {"scale": float("nan")}]
)
def test_a_scale_that_is_no_number_is_named(parameters: Any) -> None:
    weights = {f"{PATHS[0]}.lora_a": np.ones((64, 2), np.float32), f"{PATHS[0]}.lora_b": np.ones((2, 64), np.float32)}
    with pytest.raises(AdapterError, match=r"no number lora_parameters\.scale"):
        parse({"lora_parameters": parameters}, save(weights), LIMIT)


def renamed(weights: dict[str, np.ndarray], old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): array for name, array in weights.items()}


@pytest.mark.parametrize("case", bad_files(), ids=lambda case: case[0])
def test_what_does_not_fit_is_refused_with_a_reason(case: tuple[str, dict[str, Any], bytes, str]) -> None:
    _, config, data, message = case
    layout = Layout(base())
    with pytest.raises(AdapterError, match=message):
        check_fit(parse(config, data, LIMIT), layout.targets, 8)


def test_a_rank_beyond_the_limit_is_refused() -> None:
    config, weights = peft_files()
    with pytest.raises(AdapterError, match="rank is 4, and at most 3"):
        check_fit(parse(config, save(weights), LIMIT), Layout(base()).targets, 3)


def test_a_zip_that_grows_is_refused() -> None:
    import io
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", bytes(LIMIT * 4))
    with pytest.raises(AdapterError, match="unpacks to more"):
        parse({"lora_parameters": {"scale": 1}}, file.getvalue(), LIMIT)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100000])
def test_configs_that_are_none(text: bytes) -> None:
    with pytest.raises(AdapterError, match="config is not"):
        parse_config(text)


@pytest.mark.parametrize("name", ["math", "org/math-v2", "X-v1", "a.b_c", "7"])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "../x", "a/../b", "/etc", "a//b", "a b", "a@2", "a/", ".hidden", "x" * 201, "ä", "a\n"]
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(AdapterError):
        check_name(name)


def test_folders_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="holds no adapter_config"):
        read_folder(tmp_path, LIMIT)[0]
    with pytest.raises(AdapterError, match="holds no adapter_config"):
        read_folder(tmp_path / "nowhere", LIMIT)


def test_no_pattern_takes_long() -> None:
    """With a backtracking engine this one takes hours."""
    hostile = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"(a|a?)+b": 3, "(([a-z_.0-9])+.)+A": 3}}
    name = "model.layers.0.self_attn." + "a" * 60 + "!"
    tensors = {
        f"{name}.lora_A.weight": np.ones((4, 8), np.float32),
        f"{name}.lora_B.weight": np.ones((8, 4), np.float32),
    }
    assert from_peft(hostile, tensors).parts[name].b.max() == 2.0


def test_paths_of_transformers_for_a_language_model_within_another() -> None:
    part = Part(np.zeros((2, 8), np.float32), np.zeros((8, 2), np.float32))
    target = Target("linear", 8, 8)
    for inner, names in (
        ("model.", ("model.layers.0.q_proj", "model.language_model.layers.0.q_proj")),
        ("", ("model.text_model.layers.0.q_proj",)),
    ):
        own = f"language_model.{inner}layers.0.q_proj"
        targets = {own: target, "language_model.lm_head": target}
        for name in (own, *names):
            assert set(with_paths_of(Adapter({name: part}), targets).parts) == {own}
        assert set(with_paths_of(Adapter({"lm_head": part}), targets).parts) == {"language_model.lm_head"}
        for name in ("model.vision_model.encoder.layers.0.q_proj", "visual.blocks.0.q_proj"):
            renamed = with_paths_of(Adapter({name: part}), targets)
            with pytest.raises(AdapterError, match="no layer"):
                check_fit(renamed, targets, 8)
    plain = Adapter({"model.layers.0.q_proj": part})
    assert with_paths_of(plain, {"model.layers.0.q_proj": target}) is plain


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_weights_are_rounded_to_the_models_precision_as_mlx_rounds(dtype: mx.Dtype) -> None:
    layout = Layout(tiny(dtype=dtype).module)
    path, target = next((path, one) for path, one in layout.targets.items() if one.kind == "linear")
    random = np.random.default_rng(1)
    a = random.standard_normal((8, target.size)).astype(np.float32)
    a.view(np.uint32)[0] = (a.view(np.uint32)[0] & 0xFFFF0000) | 0x8000  # halfway between two of bfloat16
    b = random.standard_normal((target.out_features, 8)).astype(np.float32)
    resident = layout.place(layout.pack(Adapter({path: Part(a, b)})))
    [(placed_a, placed_b, _)] = resident.groups.values()
    assert placed_a.dtype == dtype
    assert mx.array_equal(placed_a[0], mx.array(a).astype(dtype))
    assert mx.array_equal(placed_b[0], mx.array(b.T).astype(dtype))


@pytest.mark.parametrize(("ranks", "least", "width"), [((8,), 0, 8), ((8, 8), 0, 16), ((8, 16), 0, 32), ((8,), 9, 16)])
def test_stacks_are_a_power_of_two_wide(ranks: tuple[int, ...], least: int, width: int) -> None:
    """So that few shapes are traced; with room for all that is in them."""
    assert width_of([Resident(rank, {}) for rank in ranks], least) == width
