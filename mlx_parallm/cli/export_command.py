"""`parallm export`: a network's folder from a torch state_dict and a layer list. Called by `cli`."""

import argparse
import sys
from pathlib import Path

from mlx_parallm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", type=Path, metavar="STATE", help="a state_dict: .safetensors, or .pt of torch.save")
    parser.add_argument("--layers", type=Path, required=True, help="the layer list, in JSON or YAML")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--key", help="which dict of the file, where torch.save wrote several (default: the only one)")
    parser.add_argument("--prefix", default="", help="taken off the names in the file, such as 'module.'")
    parser.add_argument("--allow-unused", action="store_true", help="leave out tensors that no layer uses")
    parser.add_argument("--force", action="store_true", help="overwrite a network that is in the folder")


def run(args: argparse.Namespace) -> int:
    if (args.output / "network.json").exists() and not args.force:
        raise ConfigError(f"{args.output} holds a network already; --force overwrites it")
    from mlx_parallm.models.networks.export import export, read_layers, read_state

    layers = read_layers(args.layers)
    model = export(read_state(args.state, args.key, args.prefix), layers, args.output, args.allow_unused)
    signature = model.info.tensors
    sys.stdout.write(f"{args.output}: a {model.info.kind} of {model.info.weight_bytes // 4:,} weights\n")
    for label, specs in (("takes", signature.inputs), ("gives", signature.outputs)):
        for spec in specs:
            shape = ", ".join("?" if dim is None else str(dim) for dim in spec.shape)
            sys.stdout.write(f"  {label} {spec.name}: {spec.dtype} ({shape})\n")
    sys.stdout.write(f"serve it: mlx_parallm_serve --model-path {args.output.name}={args.output}\n")
    return 0
