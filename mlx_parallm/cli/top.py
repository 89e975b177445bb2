"""`parallm top`: a running server's load, drawn again every second until Ctrl-C."""

import argparse
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mlx_parallm.cli.remote_commands import Remote, add_server_flags
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GIB = 1 << 30


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="look once, print, and end")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    if not args.interval > 0:
        raise ConfigError("--interval must be a positive number of seconds")
    with closing(Remote.of(args)) as remote:
        return _watch(remote, Console(), args)


def _watch(remote: Remote, console: "Console", args: argparse.Namespace) -> int:
    from rich.live import Live

    before = remote.get("/debug/metrics")
    begun = time.monotonic()
    time.sleep(min(args.interval, 1.0) if args.once else args.interval)
    now = remote.get("/debug/metrics")
    if args.once:
        console.print(view(remote.url, before, now, time.monotonic() - begun))
        return 0
    with Live(view(remote.url, before, now, time.monotonic() - begun), console=console, auto_refresh=False) as live:
        while True:
            before = now
            begun = time.monotonic()
            time.sleep(args.interval)
            now = remote.get("/debug/metrics")
            live.update(view(remote.url, before, now, time.monotonic() - begun), refresh=True)


def view(url: str, before: dict[str, Any], now: dict[str, Any], seconds: float) -> "Table":
    """Returns what happened between two looks at a server's counters."""
    from rich.table import Table

    def rate(*path: str) -> float:
        first = before
        last = now
        for name in path:
            first = first.get(name, {})
            last = last.get(name, {})
        return (float(last or 0) - float(first or 0)) / max(seconds, 1e-6)  # type: ignore[arg-type]

    grid = Table(title=f"{url}  {time.strftime('%H:%M:%S')}", show_header=False, title_justify="left")
    total = now["slots_total"]
    grid.add_row("answers", f"{now['running']} running of {total} at most, {now['queue_depth_last']} waiting")
    grid.add_row(
        "speed", f"{rate('generated_tokens'):,.0f} tokens/s written, {rate('prompt_tokens'):,.0f} tokens/s read"
    )
    fresh = rate("prompt_tokens")
    reused = rate("cached_tokens")
    share = reused / (fresh + reused) if fresh + reused else 0.0
    grid.add_row("prompts", f"{share:.0%} from the prefix cache; {now['prefix'].get('blocks', 0):,} blocks in memory")
    memory = now["memory"]
    grid.add_row("memory", f"{now['active_memory'] / GIB:.2f} GiB of {memory.get('limit', 0) / GIB:.2f} GiB")
    rows = now["kv_bytes"] / GIB
    limit = now["kv_bytes_limit"] / GIB
    grid.add_row("running rows", f"{rows:.2f} GiB of {limit:.2f} GiB")
    ssd = now["ssd"]
    if ssd:
        grid.add_row("SSD", f"{ssd.get('files', 0):,} files, {ssd.get('bytes', 0) / GIB:.2f} GiB")
    training = min(1.0, rate("background", "seconds"))
    grid.add_row(
        "engine's time", f"training {training:.0%}, predictions {min(1.0, rate('predictions', 'seconds')):.0%}"
    )
    ended = ", ".join(f"{name} {count:,}" for name, count in now["requests_finished"].items())
    grid.add_row("requests", f"{ended or 'none yet'}; {now['requests_rejected']:,} rejected")
    for name, one in (now.get("models") or {}).items():
        grid.add_row(f"  {name}", f"{one['running']} running, {one['queue_depth_last']} waiting")
    return grid
