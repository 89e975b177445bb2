"""The command itself: prints a line for each finding as it is made, or all of them as JSON."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mlx_parallm.config import ServeConfig
from mlx_parallm.doctor.findings import Finding
from mlx_parallm.errors import ParallmError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", "--model", help="model to measure: folder, .gguf file or hub id (default: the embedded model)")
    add("--port", type=int, default=8000, help="port that a server would listen on (default: %(default)s)")
    add("--ssd-cache-dir", help="folder whose speed is measured (default: the user's cache folder)")
    add("--no-model", action="store_true", help="look at the machine alone, without loading a model")
    add("--json", action="store_true", help="print one JSON object, to paste into a report")


def run(args: argparse.Namespace) -> int:
    findings = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json:
            sys.stdout.write(finding.line() + "\n")
            sys.stdout.flush()
    wrong = [finding.name for finding in findings if finding.verdict == "wrong"]
    slow = [finding.name for finding in findings if finding.verdict == "slow"]
    if args.json:
        report = {"ok": not wrong, "wrong": wrong, "slow": slow, "findings": [asdict(one) for one in findings]}
        sys.stdout.write(json.dumps(report, indent=1, default=str) + "\n")
    else:
        told = [f"wrong: {', '.join(wrong)}" if wrong else "", f"slow: {', '.join(slow)}" if slow else ""]
        sys.stdout.write("\n" + ("; ".join(filter(None, told)) or "all is well") + "\n")
    return 1 if wrong else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    from mlx_parallm.doctor import machine
    from mlx_parallm.paths import user_cache

    folder = Path(args.ssd_cache_dir).expanduser() if args.ssd_cache_dir else user_cache() / "kv"
    yield from machine.examine(args.port, folder)
    if not args.no_model:
        yield from _measure(args)


def _measure(args: argparse.Namespace) -> Iterator[Finding]:
    from mlx_parallm.doctor.probes import Probe, failed
    from mlx_parallm.engine.delivery import deliver
    from mlx_parallm.engine.start import start_engine
    from mlx_parallm.models.loader import load

    config = ServeConfig.of(model_path=(args.model_path,) if args.model_path else (), ssd=False)
    ((name, source),) = config.named_models().items()
    loader = partial(load, source, name=name, dtype="auto", max_model_len=None, trust_remote_code=False)
    try:
        engine = start_engine(loader, config, deliver)
    except ParallmError as error:
        yield failed(error)
        return
    try:
        told = dict(engine.describe())
        yield Finding("model", f"{told['model']}, {told['batch']}", numbers={"memory": told["memory"]})
        yield from Probe(engine).examine()
    finally:
        engine.stop()
