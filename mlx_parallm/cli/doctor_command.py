"""The command itself: prints a line for each finding as it is made, or all of them as JSON."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.config import ServeConfig
from mlx_parallm.doctor.findings import Finding, Verdict
from mlx_parallm.errors import ParallmError

SELFTEST_FILE = "parallm-selftest.json"
TOLD: tuple[Verdict, ...] = ("wrong", "slow", "skipped")  # verdicts that are named again at the end
SELFTEST_FORMAT = 1  # of the file; a script reads it


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", "--model", help="model to measure: folder, .gguf file or hub id (default: the embedded model)")
    add("--port", type=int, default=8000, help="port that a server would listen on (default: %(default)s)")
    add("--ssd-cache-dir", help="folder whose speed is measured (default: the user's cache folder)")
    add("--no-model", action="store_true", help="look at the machine alone, without loading a model")
    add(
        "--selftest",
        action="store_true",
        help="try everything that serving rests on, on this device and without a network, and measure it beside "
        f"mlx-lm: three minutes; writes {SELFTEST_FILE} into the current folder, unless --json is given",
    )
    add("--json", action="store_true", help="print one JSON object on standard output, to paste into a report")


def run(args: argparse.Namespace) -> int:
    begun = time.time()
    findings = []
    for finding in _selftest() if args.selftest else examine(args):
        findings.append(finding)
        if not args.json:
            sys.stdout.write(finding.line() + "\n")
            sys.stdout.flush()
    report = _report(findings)
    if args.selftest:
        report = {"selftest": SELFTEST_FORMAT, "time": int(begun), "seconds": round(time.time() - begun, 1)} | report
    if args.json:
        sys.stdout.write(json.dumps(report, indent=1, default=str) + "\n")
        return 0 if report["ok"] else 1
    told = [f"{verdict}: {', '.join(report[verdict])}" for verdict in TOLD if report[verdict]]
    sys.stdout.write("\n" + ("; ".join(told) or "all is well") + "\n")
    if args.selftest:
        sys.stdout.write(_kept(report))
    return 0 if report["ok"] else 1


def _report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings, and before them the names of those that are not well."""
    named: dict[str, list[str]] = {
        one: [finding.name for finding in findings if finding.verdict == one] for one in TOLD
    }
    return {"ok": not named["wrong"], **named, "findings": [asdict(one) for one in findings]}


def _kept(report: dict[str, Any]) -> str:
    """Writes the report to a file; returns what is to be done with it."""
    file = Path(SELFTEST_FILE).resolve()
    try:
        file.write_text(json.dumps(report, indent=1, default=str) + "\n")
    except OSError as error:
        return f"{file} can't be written ({error.strerror}): parallm doctor --selftest --json prints the report\n"
    return (
        f"{file} has all figures and holds no text, path or name of yours. docs/MACS.md says how to add it to the "
        "table of machines; with a report of something wrong, attach it.\n"
    )


def _selftest() -> Iterator[Finding]:
    from mlx_parallm.doctor import selftest

    return selftest.examine()


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
