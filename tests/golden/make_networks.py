"""Makes networks.json, networks.safetensors and state_dict.pt: what torch computes for small random networks.

    python -m venv TORCH && TORCH/bin/pip install torch numpy safetensors
    TORCH/bin/python tests/golden/make_networks.py

networks.json has the network.json of each case, networks.safetensors CASE/weights/…, CASE/inputs/… and
CASE/outputs/…. state_dict.pt is the case `cnn` as torch.save writes it. Run once; the numbers are committed.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution
from torch.distributions.transforms import AffineTransform

HERE = Path(__file__).parent
Tensors = dict[str, torch.Tensor]
TORCH = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "silu": nn.SiLU, "gelu": nn.GELU, "elu": nn.ELU}
TORCH |= {"leaky_relu": nn.LeakyReLU, "softplus": nn.Softplus}


def vector(size: int, name: str = "x") -> dict[str, Any]:
    return {name: {"shape": ["batch", size]}}


def randomise(module: nn.Module) -> nn.Module:
    """Norms and biases too, and statistics that are not those of a new layer."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.3, 2.0)
    return module.eval()


class Cases:
    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.tensors: Tensors = {}

    def add(self, name: str, definition: Any, module: nn.Module, inputs: Tensors, outputs: Tensors) -> None:
        self.definitions[name] = definition
        for kind, tensors in (("weights", module.state_dict()), ("inputs", inputs), ("outputs", outputs)):
            for key, tensor in tensors.items():
                self.tensors[f"{name}/{kind}/{key}"] = tensor.detach().clone().contiguous()

    def sequential(
        self, name: str, layers: list[tuple[dict[str, Any], nn.Module]], shape: list[Any], x: torch.Tensor
    ) -> None:
        """A chain; each layer with weights is named by its place, as in nn.Sequential."""
        module = randomise(nn.Sequential(*(layer for _, layer in layers)))
        entries = []
        for place, (entry, layer) in enumerate(layers):
            named = {"name": str(place)} if list(layer.state_dict()) else {}
            entries.append(entry | named)
        dtype = {} if x.dtype == torch.float32 else {"dtype": str(x.dtype).removeprefix("torch.")}
        definition = {"inputs": {"x": {"shape": shape} | dtype}, "layers": entries, "outputs": {"y": {}}}
        self.add(name, definition, module, {"x": x}, {"y": module(x)})


def linear(inward: int, out: int, bias: bool = True) -> tuple[dict[str, Any], nn.Module]:
    return {"type": "linear", "out_features": out} | ({} if bias else {"bias": False}), nn.Linear(inward, out, bias)


def chains(cases: Cases) -> None:
    activations = [({"type": name}, kind()) for name, kind in TORCH.items()]
    mlp = [linear(5, 7)]
    for activation in activations:
        mlp += [activation, linear(7, 7, bias=len(mlp) % 4 != 0)]
    mlp += [({"type": "layer_norm"}, nn.LayerNorm(7)), ({"type": "dropout", "p": 0.3}, nn.Dropout(0.3))]
    mlp += [
        ({"type": "gelu", "approximate": "tanh"}, nn.GELU(approximate="tanh")),
        ({"type": "softmax"}, nn.Softmax(-1)),
    ]
    cases.sequential("mlp", mlp, ["batch", 5], torch.randn(6, 5))

    cnn = [
        ({"type": "conv2d", "out_channels": 6, "kernel_size": 3, "padding": 1}, nn.Conv2d(3, 6, 3, padding=1)),
        ({"type": "batch_norm"}, nn.BatchNorm2d(6)),
        ({"type": "relu"}, nn.ReLU()),
        ({"type": "max_pool2d", "kernel_size": 2}, nn.MaxPool2d(2)),
        (
            {"type": "conv2d", "out_channels": 8, "kernel_size": [3, 2], "stride": [1, 2], "groups": 2, "bias": False},
            nn.Conv2d(6, 8, (3, 2), stride=(1, 2), groups=2, bias=False),
        ),
        ({"type": "elu", "alpha": 0.7}, nn.ELU(0.7)),
        ({"type": "avg_pool2d", "kernel_size": 2, "stride": 1, "padding": 1}, nn.AvgPool2d(2, 1, 1)),
        ({"type": "flatten"}, nn.Flatten()),
        linear(8 * 4 * 3, 4),
    ]
    cases.sequential("cnn", cnn, ["batch", 3, 10, 9], torch.randn(3, 3, 10, 9))

    conv1d = [
        (
            {"type": "conv1d", "out_channels": 5, "kernel_size": 3, "dilation": 2, "padding": 2, "stride": 2},
            nn.Conv1d(4, 5, 3, dilation=2, padding=2, stride=2),
        ),
        ({"type": "batch_norm", "epsilon": 1e-3, "affine": False}, nn.BatchNorm1d(5, eps=1e-3, affine=False)),
        ({"type": "max_pool1d", "kernel_size": 3, "stride": 2, "padding": 1}, nn.MaxPool1d(3, 2, 1)),
        ({"type": "avg_pool1d", "kernel_size": 2}, nn.AvgPool1d(2)),
        ({"type": "leaky_relu", "negative_slope": 0.2}, nn.LeakyReLU(0.2)),
    ]
    cases.sequential("conv1d", conv1d, ["batch", 4, 21], torch.randn(3, 4, 21))
    embedding = [
        ({"type": "embedding", "num_embeddings": 11, "embedding_dim": 3}, nn.Embedding(11, 3)),
        ({"type": "flatten"}, nn.Flatten()),
        linear(12, 2),
        ({"type": "log_softmax"}, nn.LogSoftmax(-1)),
    ]
    cases.sequential("embedding", embedding, ["batch", 4], torch.randint(0, 11, (5, 4)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.core = kind(4, 5, batch_first=True, **options)


def recurrent(cases: Cases) -> None:
    for kind, states in (("lstm", ("h", "c")), ("gru", ("h",))):
        for name, options in (
            (kind, {}),
            (f"{kind} deep", {"num_layers": 2, "bidirectional": True}),
            (f"{kind} without bias", {"bias": False, "num_layers": 3}),
            (f"{kind} with state", {"num_layers": 2}),
        ):
            module = randomise(Recurrent(getattr(nn, kind.upper()), **options))
            x = torch.randn(3, 6, 4)
            depth = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
            given = tuple(torch.randn(depth, 3, 5) for _ in states) if "with state" in name else None
            state: Any = None if given is None else given if kind == "lstm" else given[0]
            y, ends = module.core(x, state)
            ends = ends if kind == "lstm" else (ends,)
            layer = {"type": kind, "name": "core", "hidden_size": 5} | options
            inputs, tensors = {"x": {"shape": ["batch", "time", 4]}}, {"x": x}
            if given is not None:
                layer["inputs"] = ["x", *states]
                for one, value in zip(states, given, strict=True):
                    inputs[one] = {"shape": ["batch", depth, 5]}
                    tensors[one] = value.transpose(0, 1)
            found = {"y": y} | {f"new_{one}": end.transpose(0, 1) for one, end in zip(states, ends, strict=True)}
            sources = {"y": {"from": "core"}} | {f"new_{one}": {"from": f"core.{one}"} for one in states}
            cases.add(name, {"inputs": inputs, "layers": [layer], "outputs": sources}, module, tensors, found)


class Branches(nn.Module):
    """A residual block, two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(8, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.left(a).relu(), self.right(b)
        total = left + right
        return self.head(torch.cat([total, left * right], -1)), total


def branches(cases: Cases) -> None:
    module, a, b = randomise(Branches()), torch.randn(4, 3), torch.randn(4, 2)
    layers = [
        {"type": "linear", "name": "left", "input": "a", "out_features": 4},
        {"type": "relu", "name": "active"},
        {"type": "linear", "name": "right", "input": "b", "out_features": 4},
        {"type": "add", "name": "total", "inputs": ["active", "right"]},
        {"type": "multiply", "name": "product", "inputs": ["active", "right"]},
        {"type": "concat", "inputs": ["total", "product"]},
        {"type": "linear", "name": "head", "out_features": 2},
    ]
    outputs = {"y": {"from": "head", "shape": ["batch", 2]}, "total": {}}
    definition = {"inputs": vector(3, "a") | vector(2, "b"), "layers": layers, "outputs": outputs}
    y, total = module(a, b)
    cases.add("branches", definition, module, {"a": a, "b": b}, {"y": y, "total": total})


def distributions() -> Tensors:
    """Log-probabilities, by torch's distributions, of actions that were drawn from them."""
    logits, sizes = torch.randn(5, 7), [3, 2, 2]
    actions = Categorical(logits=logits).sample()
    parts = [Categorical(logits=part) for part in logits.split(sizes, -1)]
    several = torch.stack([part.sample() for part in parts], -1)
    mean, log_std = torch.randn(5, 3), 0.5 * torch.randn(5, 3)
    normal = Normal(mean, log_std.exp())
    raw = normal.sample()
    low, high = torch.tensor([-2.0, 0.0, -1.0]), torch.tensor([2.0, 1.0, 1.0])
    squash = [TanhTransform(cache_size=1), AffineTransform((low + high) / 2, (high - low) / 2, cache_size=1)]
    squashed = Independent(TransformedDistribution(normal, squash), 1)
    bounded = squash[1](squash[0](raw))
    return {
        "logits": logits,
        "categorical/actions": actions,
        "categorical/log_probs": Categorical(logits=logits).log_prob(actions),
        "multi_discrete/actions": several,
        "multi_discrete/log_probs": sum(part.log_prob(several[:, at]) for at, part in enumerate(parts)),
        "mean": mean,
        "log_std": log_std,
        "raw": raw,
        "gaussian/log_probs": normal.log_prob(raw).sum(-1),
        "low": low,
        "high": high,
        "tanh_gaussian/actions": bounded,
        "tanh_gaussian/log_probs": squashed.log_prob(bounded),
    }


def main() -> None:
    torch.manual_seed(20)
    cases = Cases()
    with torch.no_grad():
        chains(cases)
        recurrent(cases)
        branches(cases)
        cases.tensors |= {f"distributions/{name}": tensor.contiguous() for name, tensor in distributions().items()}
    save_file(cases.tensors, HERE / "networks.safetensors")
    (HERE / "networks.json").write_text(json.dumps(cases.definitions, indent=1) + "\n")
    prefix = "cnn/weights/"
    state = {name.removeprefix(prefix): one for name, one in cases.tensors.items() if name.startswith(prefix)}
    torch.save(
        {"state_dict": {f"module.{name}": one for name, one in state.items()}, "epoch": 3}, HERE / "state_dict.pt"
    )


if __name__ == "__main__":
    main()
