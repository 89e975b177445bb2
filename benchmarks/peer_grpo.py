"""Steps of mlx-lm-lora's own GRPO trainer, timed from outside: the peer of `rl_step.py`, in an environment of its own.

    PEER/bin/python benchmarks/peer_grpo.py MODEL_FOLDER '{"steps": 3, …}'

Needs nothing of ours. Prints a line of JSON: seconds of each step, and of its rollouts, with their tokens.
"""

import itertools
import json
import random
import sys
import time
from typing import Any

import mlx.optimizers as optim
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm_lora.trainer import grpo_trainer


class Data:
    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, place: int) -> tuple[list[int], list[int], str, str, None]:
        return self.prompts[place], [1], "", "", None


def main() -> None:
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    model, tokenizer = load(folder)
    model.freeze()
    parameters = {"rank": settings["rank"], "scale": 2.0, "dropout": 0.0, "keys": settings["keys"]}
    linear_to_lora_layers(model, len(model.layers), parameters)
    rollouts: list[tuple[float, int]] = []
    generate = grpo_trainer.generate_grpo

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        found = generate(*args, **kwargs)
        rollouts.append((time.perf_counter() - begun, sum(len(one.tolist()) for one in found[0])))
        return found

    grpo_trainer.generate_grpo = timed
    chance = random.Random(0)

    def reward(prompts: Any, completions: Any, answer: Any, types: Any = None) -> list[float]:
        return [chance.random() for _ in completions]

    begun: list[float] = []
    prompts = [[chance.randrange(100, 40_000) for _ in range(settings["prompt_tokens"])] for _ in range(64)]
    args = grpo_trainer.GRPOTrainingArgs(
        batch_size=settings["prompts"],
        iters=settings["steps"] + 1,
        group_size=settings["group_size"],
        max_completion_length=settings["answer_tokens"],
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        steps_per_report=1000,
        steps_per_eval=1000,
        steps_per_save=1000,
        max_seq_length=512,
        adapter_file=settings["scratch"],
    )

    class Watch:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    batches = grpo_trainer.iterate_grpo_batches

    def watched(*inner: Any, **kwargs: Any) -> Any:
        for batch in batches(*inner, **kwargs):
            begun.append(time.perf_counter())
            yield batch

    grpo_trainer.train_grpo(
        model,
        None,
        tokenizer,
        optim.AdamW(1e-5),
        Data(prompts),
        None,
        [reward],
        args,
        iterate_batches=watched,
        training_callback=Watch(),
    )
    begun.append(time.perf_counter())
    steps = [end - start for start, end in itertools.pairwise(begun)]
    json.dump({"steps": steps[1:], "rollouts": rollouts[1:]}, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
