"""Makes trl.json: what TRL's own trainers give for made-up tensors: losses, their gradients, and advantages.

    python -m venv TRL && TRL/bin/pip install trl torch && TRL/bin/python tests/golden/make_trl.py

Run once; the numbers are committed. Losses are those of GRPOTrainer._compute_loss and RLOOTrainer._compute_loss; the
trainer around them is a stand-in, since they read only its settings. Advantages are those that whole trainers come to
in a step on a tiny model, with rewards given here. TRL has no REINFORCE: RLOO's loss with a clip that never
acts is the same.
"""

import json
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

NEVER = 1e9
CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo with KL": {"loss_type": "grpo", "beta": 0.1},
    "grpo, asymmetric clip": {"loss_type": "grpo", "epsilon_high": 0.4},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo with KL": {"loss_type": "dapo", "beta": 0.05, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},  # the bound itself
    "cispo with KL": {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.05},
    "rloo": {"loss_type": "rloo"},
    "rloo, asymmetric clip": {"loss_type": "rloo", "epsilon_high": 0.5},
    "reinforce": {"loss_type": "reinforce", "epsilon_low": NEVER, "epsilon_high": NEVER},
}
MAX_LENGTH = 32
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]  # two groups of three


def trainer_of(case: dict[str, object], new: torch.Tensor) -> MagicMock:
    trainer = MagicMock()
    settings = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}
    fixed = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "max_completion_length": MAX_LENGTH,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
    }
    for name, value in {**settings, **fixed, **case}.items():
        setattr(trainer, name, value)
    trainer.args.delta = None
    trainer.args.use_bias_correction_kl = False
    trainer.model.training = False
    trainer.accelerator.num_processes = 1
    trainer._get_per_token_logps_and_entropies.return_value = (new, torch.zeros_like(new), None)
    trainer.accelerator.gather.side_effect = lambda value: value
    trainer.accelerator.reduce.side_effect = lambda value, reduction: value
    return trainer


def advantages_of(kind: type, config: type, **settings: object) -> list[float]:
    """What a step of a whole trainer makes of the rewards."""
    vocabulary = {word: place for place, word in enumerate(["<eos>", "a", "b", "c", "d"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), pad_token_id=0, eos_token_id=0, **small))
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"output_dir": folder, "num_generations": 3, "per_device_train_batch_size": 6, "max_steps": 1}
        arguments = config(**options, **settings, max_completion_length=4, report_to=[], use_cpu=True)
        trainer = kind(
            model=model,
            reward_funcs=lambda completions, **_: REWARDS[: len(completions)],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a b", "c d"]}),
            processing_class=wrapped,
        )
        scored = trainer._generate_and_score_completions

        def noted(inputs: list[dict[str, object]]) -> dict[str, torch.Tensor]:
            """Looks at them before they are shuffled."""
            found = scored(inputs)
            seen.append(found["advantages"].tolist())
            return found

        trainer._generate_and_score_completions = noted
        trainer.train()
    return seen[0]


def main() -> None:
    torch.manual_seed(0)
    rows, length = 6, 9
    old = -torch.rand(rows, length) * 3
    new = old + 0.4 * torch.randn(rows, length)
    reference = old + 0.3 * torch.randn(rows, length)
    mask = (torch.arange(length)[None] < torch.tensor([9, 7, 5, 9, 3, 1])[:, None]).float()
    advantages = {
        "grpo": advantages_of(GRPOTrainer, GRPOConfig, loss_type="grpo"),
        "dr_grpo": advantages_of(GRPOTrainer, GRPOConfig, loss_type="dr_grpo", scale_rewards=False),
        "rloo": advantages_of(RLOOTrainer, RLOOConfig, beta=0.0),
    }
    found = {}
    for name, case in CASES.items():
        leaf = new.clone().requires_grad_()
        inputs = {
            "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
            "prompt_mask": torch.ones(rows, 1),
            "completion_ids": torch.zeros(rows, length, dtype=torch.long),
            "completion_mask": mask,
            "advantages": torch.tensor(advantages["grpo"]),  # any will do for a loss
            "old_per_token_logps": old,
            "old_logps": (old * mask).sum(1),
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        }
        kind = RLOOTrainer if case["loss_type"] in ("rloo", "reinforce") else GRPOTrainer
        loss = kind._compute_loss(trainer_of(case, leaf), None, inputs)
        loss.backward()
        found[name] = {"settings": case, "loss": loss.item(), "gradient": leaf.grad.tolist()}
    document = {
        "trl": trl.__version__,
        "max_length": MAX_LENGTH,
        "rewards": REWARDS,
        "advantages": advantages,
        "old": old.tolist(),
        "new": new.tolist(),
        "reference": reference.tolist(),
        "mask": mask.tolist(),
        "cases": found,
    }
    (Path(__file__).parent / "trl.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
