"""GGUF models of each architecture through the engine: rows of a batch answer as the bare model does, one by one."""

from pathlib import Path

import pytest

from mlx_parallm import LLM, SamplingParams
from mlx_parallm.models.loader import load
from tests.engine.harness import Bare
from tests.gguf_models import model_file

PROMPTS = [[5, 90, 17, 203, 44, 44, 9, 260, 31, 8], [7], [12, 250, 99, 3, 77], [5, 90, 17, 203, 44, 1, 2, 3]]
TOKENS = 8


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma3", "Q8_0"),
        ("phi3", "Q4_0"),
        ("mistral", "Q4_0"),
        ("mistral3", "F16"),
        ("ministral3", "Q8_0"),
        ("qwen3moe", "Q8_0"),
        ("mixtral", "Q4_1"),
    ],
)
def test_batched_answers_are_the_bare_models(name: str, kind: str, tmp_path: Path) -> None:
    path = str(model_file(name, kind)[0].write(tmp_path / f"{name}.gguf"))
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(path, max_batch_size=4) as model:
        together = [answer.outputs[0].token_ids for answer in model.generate(PROMPTS, greedy)]
        alone = [model.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in PROMPTS]
    bare = Bare(load(path, name="bare"))
    expected = [
        bare.greedy(prompt, TOKENS, ignore_eos=True, answer=answer)[0]
        for prompt, answer in zip(PROMPTS, together, strict=True)
    ]
    assert together == alone == expected
