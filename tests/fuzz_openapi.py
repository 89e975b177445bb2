"""Schemathesis on /openapi.json of a real server with tiny models of six kinds: does any request get a 5xx?

    python -m tests.fuzz_openapi --seconds 600 --command /path/to/schemathesis

`schemathesis` is best installed in an environment of its own, such as `python -m venv fuzz`.
Left out are routes that hold up all others (`/pause`) and the stream without an end (`/dashboard/events`).
Exit code 1 if an answer was a 5xx.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.support.classifiers import with_labels, write_classifier
from tests.support.embedding_folders import write_model
from tests.support.networks import mlp_policy, sequence_network
from tests.support.servers import ours, running
from tests.tiny import save_tiny, tiny

HEADS = json.loads((Path(__file__).parent / "golden" / "heads.json").read_text())["families"]["bert"]
HOLDS_UP = r"^/(pause|pause_generation|dashboard/events)$"


def model_flags(folder: Path) -> list[str]:
    """A model of each kind, named after it."""
    (folder / "chat").mkdir()
    save_tiny(tiny("llama"), folder / "chat")
    write_model(folder / "embedding", "cls")
    for name, labels in (("classifier", ("no", "yes")), ("reward", ("score",))):
        config, shapes = with_labels(HEADS["config"], HEADS["shapes"], labels)
        write_classifier(folder / name, config, shapes)
    sequence_network(folder / "network")
    mlp_policy(folder / "policy")
    names = ("chat", "embedding", "classifier", "reward", "network", "policy")
    return [flag for name in names for flag in ("--model-path", f"{name}={folder / name}")]


def schemathesis(command: str, url: str, seconds: float, seed: int) -> int:
    run = [command, "run", f"{url}/openapi.json", "--max-time", str(int(seconds)), "--seed", str(seed)]
    run += ["--checks", "not_a_server_error", "--continue-on-failure", "--exclude-path-regex", HOLDS_UP]
    run += ["--request-timeout", "60", "--suppress-health-check", "all", "--no-color"]
    return subprocess.run(run, cwd=tempfile.gettempdir()).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of requests (default: %(default)s)")
    parser.add_argument("--command", default="schemathesis", help="the program to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-training", action="store_true", help="a server that does not train (default: one that does)"
    )
    args = parser.parse_args()
    command = shutil.which(args.command)
    if command is None:
        parser.error(f"{args.command} is not installed: pip install schemathesis, or name it with --command")
    os.environ["HF_HUB_OFFLINE"] = "1"  # `/v1/models/load` takes any text for a hub id
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        flags = [*model_flags(Path(scratch)), "--max-model-len", "256", "--max-tokens", "8"]
        flags += ["--responses-dir", f"{scratch}/responses", "--responses-max-bytes", "16MB"]
        if not args.no_training:
            flags += ["--enable-rl-training", "--lora-rank", "4", "--checkpoint-dir", f"{scratch}/checkpoints"]
        with running(ours(None, flags, fork=False)) as server:
            httpx.get(f"{server.url}/openapi.json", timeout=120)  # made at its first use, which takes a while
            code = schemathesis(command, server.url, args.seconds, args.seed)
            ended = server.process.poll()
            sys.stdout.write(
                f"{server.log()[-6000:]}\nschemathesis ended with {code}; the server runs: {ended is None}\n"
            )
    return 1 if code or ended is not None else 0


if __name__ == "__main__":
    sys.exit(main())
