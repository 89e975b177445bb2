"""`parallm pull`: downloads a model from the Hugging Face hub, goes on where it broke off, and checks the bytes."""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

from mlx_parallm.errors import ParallmError, UnavailableError

# What serving reads; not the copies of the weights in other frameworks' formats.
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "tokenizer*", "*.tiktoken")
PIECE = 1 << 22


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a hub id, such as mlx-community/Qwen3-4B-4bit")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: %(default)s)")
    parser.add_argument("--to", type=Path, help="folder to write to (default: the hub's cache, where serve finds it)")
    parser.add_argument(
        "--file", action="append", help="only files of this name or pattern; may be repeated, e.g. *.gguf"
    )


def run(args: argparse.Namespace) -> int:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                args.model,
                revision=args.revision,
                local_dir=args.to,
                allow_patterns=args.file or list(PATTERNS),
            )
        )
        wrong = damaged(folder, _digests(args.model, args.revision))
    except RepositoryNotFoundError as error:
        raise ParallmError(f"the hub has no model {args.model!r}, or it asks for a token (HF_TOKEN)") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UnavailableError(f"{args.model} can't be downloaded: {error}; run it again to go on from here") from error
    for path in wrong:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if wrong:
        names = ", ".join(path.name for path in wrong)
        raise ParallmError(f"damaged on the way: {names}; they are removed, run the command again to fetch them")
    source = folder if args.to is not None else args.model
    sys.stdout.write(f"{folder}\nserve it with: mlx_parallm_serve --model-path {source}\n")
    return 0


def _digests(model: str, revision: str) -> dict[str, str]:
    """SHA-256 of the large files, by their names, as the hub has them."""
    from huggingface_hub import HfApi

    found: Any = HfApi().model_info(model, revision=revision, files_metadata=True)
    return {one.rfilename: one.lfs.sha256 for one in found.siblings or [] if one.lfs is not None}


def damaged(folder: Path, digests: dict[str, str]) -> list[Path]:
    """Files whose bytes are not those of their digest; those that were not downloaded are left out."""
    wrong = []
    for name, expected in digests.items():
        path = folder / name
        if path.is_file() and _sha256(path) != expected:
            wrong.append(path)
    return wrong


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
