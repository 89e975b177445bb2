"""What a start tells people while it is under way. `serve`, `train` and the loader of models call it; no MLX.

A line on standard output as a step begins, and one at its end if it took long. In between, standard error has a line
that moves where it is a terminal, and now and then a line of the log where it is not.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)

SLOW_SECONDS = 1.0  # a step that takes longer says so when it is done
FIRST_SECONDS = 2.0  # of a step, before the log tells of it
NEXT_SECONDS = 10.0  # between two lines of the log
LOOK_SECONDS = 0.2  # between two looks at how far it is

Tell = Callable[[str], None]  # what the step does now
Share = Callable[[], float | None]  # of the step that is done; None where nobody knows
# Called around each slow step of a start, with its name; without a share, the step shows by itself how far it is.
StartProgress = Callable[[str, Share | None], AbstractContextManager[Tell]]


def unknown() -> float | None:
    return None


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def progress(what: str, share: Share | None = None) -> Iterator[Tell]:
    say(f"  {what} ...")
    begun = time.perf_counter()
    if share is None:
        yield lambda text: None
    else:
        with _moving(what, share) as tell:
            yield tell
    if (seconds := time.perf_counter() - begun) > SLOW_SECONDS:
        say(f"  {what}: done in {seconds:.1f} s")


@contextmanager
def silent(what: str, share: Share | None = None) -> Iterator[Tell]:
    yield lambda text: None


@contextmanager
def _moving(what: str, share: Share) -> Iterator[Tell]:
    texts = [what]
    ended = threading.Event()
    show = _show_bar if sys.stderr.isatty() else _log_lines
    thread = threading.Thread(target=show, args=(texts, share, ended), name="progress", daemon=True)
    thread.start()
    try:
        yield texts.append
    finally:
        ended.set()
        thread.join()


def _log_lines(texts: list[str], share: Share, ended: threading.Event) -> None:
    begun = time.monotonic()
    pause = FIRST_SECONDS
    while not ended.wait(pause):
        done = share()
        far = "" if done is None else f"{done:.0%}, "
        log.info("%s: %s%.0f s so far", texts[-1], far, time.monotonic() - begun)
        pause = NEXT_SECONDS


def _show_bar(texts: list[str], share: Share, ended: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(texts[-1], total=None)
        while not ended.wait(LOOK_SECONDS):
            done = share()
            bar.update(task, description=texts[-1], completed=done or 0.0, total=None if done is None else 1.0)
