"""Makes trl.json: what TRL's own GRPOTrainer._compute_loss gives for made-up tensors, and its gradient.

    python -m venv TRL && TRL/bin/pip install trl torch && TRL/bin/python tests/golden/make_trl.py

Run once; the numbers are committed. The trainer around the method is a stand-in: the loss reads only its settings.
"""

import json
from pathlib import Path
from unittest.mock import MagicMock

import torch
import trl
from trl import GRPOTrainer

CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo with KL": {"loss_type": "grpo", "beta": 0.1},
    "grpo, asymmetric clip": {"loss_type": "grpo", "epsilon_high": 0.4},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo with KL": {"loss_type": "dapo", "beta": 0.05, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
MAX_LENGTH = 32


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
    return trainer


def main() -> None:
    torch.manual_seed(0)
    rows, length = 6, 9
    old = -torch.rand(rows, length) * 3
    new = old + 0.4 * torch.randn(rows, length)
    reference = old + 0.3 * torch.randn(rows, length)
    mask = (torch.arange(length)[None] < torch.tensor([9, 7, 5, 9, 3, 1])[:, None]).float()
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, -1.0])
    groups = rewards.view(-1, 3)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
    found = {}
    for name, case in CASES.items():
        leaf = new.clone().requires_grad_()
        inputs = {
            "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
            "prompt_mask": torch.ones(rows, 1),
            "completion_ids": torch.zeros(rows, length, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(trainer_of(case, leaf), None, inputs)
        loss.backward()
        found[name] = {"settings": case, "loss": loss.item(), "gradient": leaf.grad.tolist()}
    document = {
        "trl": trl.__version__,
        "max_length": MAX_LENGTH,
        "rewards": rewards.tolist(),
        "advantages": advantages.tolist(),
        "old": old.tolist(),
        "new": new.tolist(),
        "reference": reference.tolist(),
        "mask": mask.tolist(),
        "cases": found,
    }
    (Path(__file__).parent / "trl.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
