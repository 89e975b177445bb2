"""Makes trl_supervised.json and .safetensors: five steps of TRL's SFTTrainer and DPOTrainer with PEFT's LoRA on a small
random Llama.

    python -m venv TRL && TRL/bin/pip install trl torch peft && TRL/bin/python tests/golden/make_trl_supervised.py

Run once; the files are committed: the model, the adapters before and after, the batches as the trainers were handed
them, and the loss of each step.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STEPS, BATCH = 5, 4
MODEL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 1.0}


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<eos>": 0} | {f"w{number}": number for number in range(1, MODEL["vocab_size"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL, initializer_range=0.4, pad_token_id=0, eos_token_id=0))


def words(chance: random.Random, least: int, most: int) -> str:
    return " ".join(f"w{chance.randrange(1, MODEL['vocab_size'])}" for _ in range(chance.randint(least, most)))


def adapter(trained: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in trained.named_parameters() if "lora_" in name}
    return {name.replace("base_model.model.", "").replace(".default", ""): value for name, value in found.items()}


def run(trainer: Any, mask_name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What each step was handed and came to, and the adapter before and after."""
    steps: list[dict[str, Any]] = []
    original = trainer.compute_loss

    def noted(model: object, inputs: dict[str, torch.Tensor], *args: object, **options: object) -> torch.Tensor:
        kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        loss = original(model, inputs, *args, **options)
        mask = kept["labels"] != -100 if mask_name == "labels" else kept[mask_name] == 1
        lengths = kept["attention_mask"].sum(1).tolist()
        rows = [
            {"tokens": line[:length].tolist(), "mask": learnt[:length].int().tolist()}
            for line, learnt, length in zip(kept["input_ids"], mask, lengths, strict=True)
        ]
        steps.append({"rows": rows, "loss": loss.item()})
        return loss

    trainer.compute_loss = noted
    before = adapter(trainer.model)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    for step, norm in zip(steps, norms, strict=True):
        step["grad_norm"] = float(norm)
    return {"steps": steps}, before, adapter(trainer.model)


def options(folder: str) -> dict[str, Any]:
    return {
        **SETTINGS,
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }


def main() -> None:
    chance = random.Random(0)
    tensors = {f"model.{name}": value.contiguous() for name, value in model().state_dict().items()}
    document: dict[str, Any] = {
        "trl": trl.__version__,
        "model": MODEL,
        "lora": LORA,
        "settings": SETTINGS,
        "steps": STEPS,
    }
    rows = [{"prompt": words(chance, 3, 8), "completion": " " + words(chance, 2, 9)} for _ in range(STEPS * BATCH)]
    pairs = [
        {"prompt": words(chance, 3, 8), "chosen": " " + words(chance, 2, 7), "rejected": " " + words(chance, 2, 7)}
        for _ in range(STEPS * BATCH)
    ]
    with tempfile.TemporaryDirectory() as folder:
        common = {"model": model(), "processing_class": tokenizer(), "peft_config": LoraConfig(**LORA)}
        sft = SFTTrainer(args=SFTConfig(**options(folder)), train_dataset=Dataset.from_list(rows), **common)
        document["sft"], before, after = run(sft, "labels")
        tensors |= {f"sft.before.{name}": value for name, value in before.items()}
        tensors |= {f"sft.after.{name}": value for name, value in after.items()}
        common = {"model": model(), "processing_class": tokenizer(), "peft_config": LoraConfig(**LORA)}
        arguments = DPOConfig(**options(folder), beta=0.1)
        dpo = DPOTrainer(args=arguments, train_dataset=Dataset.from_list(pairs), **common)
        document["dpo"], before, after = run(dpo, "completion_mask")
        tensors |= {f"dpo.before.{name}": value for name, value in before.items()}
        tensors |= {f"dpo.after.{name}": value for name, value in after.items()}
    folder = Path(__file__).parent
    (folder / "trl_supervised.json").write_text(json.dumps(document) + "\n")
    save_file(
        {name: value.float().contiguous() for name, value in tensors.items()}, folder / "trl_supervised.safetensors"
    )


if __name__ == "__main__":
    main()
