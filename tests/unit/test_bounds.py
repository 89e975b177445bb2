"""Bounds and names that users meet, each where it is checked: sampling, bodies, options, memory, recommendations."""

import json
import math
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from mlx_parallm.cli.main import main
from mlx_parallm.cli.recommend import BITS, EFFICIENCY, MODELS, prospects
from mlx_parallm.config import ServeConfig
from mlx_parallm.config.options import parse_bool, parse_bytes
from mlx_parallm.devices.device import DEVICES
from mlx_parallm.devices.profile import DeviceKind
from mlx_parallm.errors import ConfigError, ContextLengthError, InvalidRequestError
from mlx_parallm.llm import LLM
from mlx_parallm.runtime.weight_files import weight_bytes
from mlx_parallm.sampling_params import MAX_STOP_CHARS, MAX_STOPS, SamplingParams, check_sampling
from mlx_parallm.server.api.generate.sglang import SglangSampling
from mlx_parallm.server.api.predict import _content
from mlx_parallm.server.api.predict.bodies import ActBody
from mlx_parallm.server.generation.call import GenerationCall
from mlx_parallm.server.generation.limits import sampling_for
from mlx_parallm.server.http import routing
from mlx_parallm.text.prompts import CHECKED_CHARACTERS, Prompts
from mlx_parallm.validation import check_ids
from tests.unit.vocabularies import byte_level


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias", "100"),
        ({"logit_bias": {5: 100.5}}, "logit_bias", "between -100 and 100, not 100.5"),
        ({"logit_bias": {5: True}}, "logit_bias", "between -100 and 100, not True"),
        ({"stop_token_ids": (100,)}, "stop_token_ids", "100"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "-1"),
        ({"stop": ("",)}, "stop", "not empty"),
        ({"stop": ("a",) * (MAX_STOPS + 1)}, "stop", f"at most {MAX_STOPS} stop strings"),
        ({"stop": ("a" * (MAX_STOP_CHARS + 1),)}, "stop", f"at most {MAX_STOP_CHARS} characters"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens is 4, over the limit of 3"),
        ({"max_tokens": 0}, "max_tokens", "no prompt_logprobs"),
        ({"temperature": float("nan")}, "temperature", "between 0 and"),
        ({"temperature": "hot"}, "temperature", "must be a number, not 'hot'"),
        ({"top_p": 1.01}, "top_p", "at most 1"),
        ({"top_k": 1.5}, "top_k", "must be a whole number, not 1.5"),
        ({"n": True}, "n", "must be a whole number, not True"),
    ],
)
def test_sampling_that_no_model_can_take_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as found:
        check_sampling(SamplingParams(**fields), 100)
    assert found.value.param == param
    assert said in found.value.message


def test_sampling_at_its_bounds_is_taken() -> None:
    for fields in (
        {"logit_bias": {0: -100, 99: 100}},
        {"stop_token_ids": (0, 99)},
        {"stop": ("a" * MAX_STOP_CHARS,) * MAX_STOPS},
        {"max_tokens": 3, "min_tokens": 3},
        {"max_tokens": 0, "prompt_logprobs": 0},
    ):
        check_sampling(SamplingParams(**fields), 100)  # type: ignore[arg-type]


def test_seeds_have_64_bits() -> None:
    for seed in (-(2**63), 2**63 - 1):
        assert SglangSampling.model_validate({"seed": seed}).sampling_seed == seed
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(ValidationError):
            SglangSampling.model_validate({"seed": seed})


def test_a_policy_is_named_in_two_ways() -> None:
    for name in ("model_id", "model"):
        body = ActBody.model_validate({name: "cartpole", "observations": [[0.0]]})
        assert (body.model_id, body.deterministic) == ("cartpole", False)


@pytest.mark.parametrize("top_k", [-1, 0, 64, 1000])
def test_a_top_k_of_the_whole_vocabulary_cuts_nothing(top_k: int) -> None:
    served: Any = SimpleNamespace(model=SimpleNamespace(vocab_size=64), context_length=128)
    call = GenerationCall(prompts=["a"], sampling=SamplingParams(top_k=top_k))
    assert sampling_for(call, served, 1, None, None).top_k == 0


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_a_context_that_is_full_is_told_in_openai_s_words(param: str) -> None:
    assert ContextLengthError.of(8, 9, param=param).message == (
        f"This model's maximum context length is 8 tokens. However, your {param} resulted in 9 tokens, and the "
        f"completion needs at least one more. Please reduce the length of the {param}."
    )
    assert f"(5 in the {param}, 4 in the completion)" in ContextLengthError.of(8, 5, 4, param=param).message


def test_token_ids_are_within_the_vocabulary() -> None:
    check_ids([0, 99], 100, "prompt")
    for ids in ([100], [3, -1], [5, 100]):
        with pytest.raises(InvalidRequestError):
            check_ids(ids, 100, "prompt")


def test_a_body_has_so_many_values_names_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_VALUES", 10)
    monkeypatch.setattr(routing, "MAX_COLONS", 6)
    monkeypatch.setattr(routing, "MAX_OBJECTS", 4)
    taken = {"a": [{}, {}, {}], "b": "{{{{{"}
    for value in (list(range(11)), {str(number): 1 for number in range(6)}, taken):
        assert routing._parsed(json.dumps(value, separators=(",", ":")).encode()) == value
    for value, what in (
        (list(range(12)), "more than 10 values"),
        ({str(number): 1 for number in range(7)}, "more than 6 colons"),
        ([{}, {}, {}, {}, {}], "more than 4 objects"),
        ({"a": {"b": [{}, {"c": {}}]}, "d": {}}, "more than 4 objects"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            routing._parsed(json.dumps(value, separators=(",", ":")).encode())


def test_a_body_is_nested_so_deeply() -> None:
    depth = routing.MAX_DEPTH
    assert routing._parsed(b"[" * depth + b"]" * depth)
    with pytest.raises(InvalidRequestError, match=f"more than {depth} levels"):
        routing._parsed(b"[" * (depth + 1) + b"]" * (depth + 1))


def test_a_model_in_a_script_has_as_many_rows_as_a_server() -> None:
    default = signature(LLM).parameters["max_batch_size"].default
    assert default == ServeConfig().batch.max_batch_size == 32


def test_booleans_and_sizes_as_people_write_them() -> None:
    for text in ("1", "true", "Yes", "ON"):
        assert parse_bool(text) is True
    for text in ("0", "False", "no", "off", ""):
        assert parse_bool(text) is False
    with pytest.raises(ConfigError):
        parse_bool("maybe")
    assert [parse_bytes(text) for text in ("12", "1k", "2MB", "3GiB", 5)] == [12, 1000, 2_000_000, 3 << 30, 5]


def test_prompts_that_are_too_long_are_refused_by_their_beginning() -> None:
    prompts = Prompts(byte_level())
    text = "x" * (4 * CHECKED_CHARACTERS * 10)
    assert len(prompts.encode("x" * 9, add_special_tokens=False, limit=10)) == 9
    with pytest.raises(ContextLengthError) as found:
        prompts.encode(text, add_special_tokens=False, limit=10)
    assert found.value.param == "prompt"


def test_weights_are_known_before_they_are_loaded(tmp_path: Path) -> None:
    kinds = ("float64", "float32", "float16", "int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8")
    for kind in kinds:
        folder = tmp_path / kind
        folder.mkdir()
        save_file({"a": np.zeros((4, 8), kind)}, folder / "model.safetensors")
        assert weight_bytes(folder, DEVICES["metal"]) == 32 * np.dtype(kind).itemsize, kind
    assert weight_bytes(tmp_path / "float16", DEVICES["cpu"]) == 32 * 4
    assert weight_bytes(tmp_path / "nothing", DEVICES["cpu"]) == 0
    (tmp_path / "model.gguf").write_bytes(b"x" * 900)
    assert [weight_bytes(tmp_path / "model.gguf", DEVICES[kind]) for kind in ("metal", "cpu", "cuda")] == [
        900,
        6400,
        3200,
    ]


def test_caches_of_recommended_models_are_those_of_their_configs() -> None:
    layers_heads_width = {
        "Qwen3-0.6B-4bit": (28, 8, 128),
        "Llama-3.2-1B-Instruct-4bit": (16, 8, 64),
        "Qwen3-1.7B-4bit": (28, 8, 128),
        "Llama-3.2-3B-Instruct-4bit": (28, 8, 128),
        "Qwen3-4B-4bit": (36, 8, 128),
        "Qwen3-8B-4bit": (36, 8, 128),
        "Qwen3-14B-4bit": (40, 8, 128),
        "gpt-oss-20b-MXFP4-Q4": (24, 8, 64),
        "Qwen3-30B-A3B-4bit": (48, 4, 128),
        "Qwen3-32B-4bit": (64, 8, 128),
        "Llama-3.3-70B-Instruct-4bit": (80, 8, 128),
        "gpt-oss-120b-MXFP4-Q4": (36, 8, 64),
    }
    known = {name: 2 * math.prod(numbers) for name, numbers in layers_heads_width.items()}
    assert {model.name.removeprefix("mlx-community/"): model.kv for model in MODELS} == known


@pytest.mark.parametrize(("kind", "bits"), [("cpu", 32), ("metal", BITS), ("cuda", 16)])
def test_weights_are_as_wide_as_the_device_computes_with_them(
    kind: DeviceKind, bits: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.devices.device.this_device", lambda: DEVICES[kind])
    monkeypatch.setattr("mlx_parallm.cli.recommend.bandwidth", lambda: 1e11)
    assert main(["recommend", "--json", "--memory-limit", "64GiB"]) == 0
    (one,) = [one for one in json.loads(capsys.readouterr().out)["models"] if "Qwen3-4B" in one["name"]]
    assert one["weights"] == int(4e9 * bits / 8)


def test_recommendations_fit_and_are_as_fast_as_the_memory() -> None:
    found = prospects(8 << 30, 100e9, BITS)
    assert [one.name for one in found] == [model.name for model in MODELS[: len(found)]][::-1]
    assert 4 <= len(found) < len(MODELS)
    for one in found:
        (model,) = [model for model in MODELS if model.name == one.name]
        assert one.weights == int(model.parameters * 1e9 * BITS / 8)
        assert one.row == model.kv * 2 * 8192
        assert one.answers == int((0.9 * (8 << 30) - one.weights) // one.row) >= 1
        assert one.speed == pytest.approx(EFFICIENCY * 100e9 / (model.active * 1e9 * BITS / 8))
    (wide, *_) = prospects(8 << 30, 100e9, 32.0)
    (narrow,) = [one for one in prospects(8 << 30, 100e9, 16.0) if one.name == wide.name]
    assert wide.row == 2 * narrow.row
    assert prospects(1 << 20, 100e9, BITS) == []


def test_a_body_of_tensors_may_be_a_file() -> None:
    content = _content(ActBody)
    assert list(content) == ["application/json", "application/x-safetensors"]
    assert content["application/x-safetensors"] == {"schema": {"type": "string", "format": "binary"}}
