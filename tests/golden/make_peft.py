"""Makes the golden numbers in this folder, once: what PEFT with torch computes with adapters on the tiny Llama.

    python -m venv golden && golden/bin/pip install torch peft transformers
    golden/bin/python tests/golden/make_peft.py FOLDER      # the tiny model, as tests.tiny.save_tiny writes it

Writes peft_NAME/adapter_config.json and adapter_model.safetensors as PEFT saves them, and peft.json: tokens, and the
logits after the last of them for the model alone and with each adapter.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
TOKENS = [[5, 20, 77, 131, 9, 250, 63, 48], [200, 3, 17, 90, 91, 92, 8, 30]]
ADAPTERS = {
    "lora": dict(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"]),
    "rslora": dict(r=4, lora_alpha=3, use_rslora=True, target_modules=["o_proj", "down_proj"]),
    "patterns": dict(
        r=4,
        lora_alpha=8,
        target_modules=["k_proj", "gate_proj"],
        rank_pattern={"gate_proj": 2},
        alpha_pattern={"layers.1.self_attn.k_proj": 20},
    ),
    "dora": dict(r=8, lora_alpha=8, use_dora=True, target_modules=["q_proj", "up_proj"]),
    "embedding": dict(r=4, lora_alpha=8, target_modules=["embed_tokens", "lm_head"]),
}


def last_logits(model: torch.nn.Module) -> list[list[float]]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(TOKENS)).logits[:, -1]
    return [[round(value, 6) for value in row] for row in logits.double().tolist()]


def main(folder: str) -> None:
    def base() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    found = {"tokens": TOKENS, "logits": {"base": last_logits(base())}}
    for number, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(number)
        model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        for key, parameter in model.named_parameters():
            if "lora_" in key and "magnitude" not in key:
                torch.nn.init.normal_(parameter.data, std=0.2)
            elif "magnitude" in key:
                parameter.data *= 1 + 0.3 * torch.rand_like(parameter.data)
        found["logits"][name] = last_logits(model)
        model.save_pretrained(HERE / f"peft_{name}", save_embedding_layers=False)
        (HERE / f"peft_{name}" / "README.md").unlink(missing_ok=True)
    (HERE / "peft.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
