"""Makes adamw.json: what five steps of torch's AdamW do to made-up parameters, with its clip and its schedule.

    python -m venv TORCH && TORCH/bin/pip install torch && TORCH/bin/python tests/golden/make_adamw.py

Run once; the numbers are committed.
"""

import json
from pathlib import Path

import torch

STEPS = 5
CASES = {
    "plain": {"learning_rate": 1e-2},
    "weight decay": {"learning_rate": 1e-2, "weight_decay": 0.1},
    "linear schedule": {"learning_rate": 1e-2, "schedule": "linear", "total_steps": 8},
    "clipped": {"learning_rate": 1e-2, "max_grad_norm": 0.5},
    "all of them": {
        "learning_rate": 3e-3,
        "weight_decay": 0.05,
        "schedule": "linear",
        "total_steps": 6,
        "max_grad_norm": 1.0,
    },
}


def steps(case: dict[str, float], parameters: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> list[object]:
    learnt = [one.clone().requires_grad_() for one in parameters]
    optimizer = torch.optim.AdamW(learnt, lr=case["learning_rate"], weight_decay=case.get("weight_decay", 0.0))
    total = case.get("total_steps", 0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (total - step) / total if total else 1.0)
    found = []
    for some in gradients:
        for one, gradient in zip(learnt, some, strict=True):
            one.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(learnt, case.get("max_grad_norm", 1e9))
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        values = [one.detach().tolist() for one in learnt]
        found.append({"norm": norm.item(), "learning_rate": rate, "parameters": values})
    return found


def main() -> None:
    torch.manual_seed(0)
    shapes = [(3, 4), (3, 4), (5,)]  # two of one shape
    parameters = [torch.randn(shape) for shape in shapes]
    gradients = [[scale * torch.randn(shape) for shape in shapes] for scale in (1.0, 0.1, 1e-3, 3.0, 0.5)]
    document = {
        "torch": torch.__version__,
        "parameters": [one.tolist() for one in parameters],
        "gradients": [[one.tolist() for one in some] for some in gradients],
        "cases": {
            name: {"settings": case, "steps": steps(case, parameters, gradients)} for name, case in CASES.items()
        },
    }
    (Path(__file__).parent / "adamw.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
