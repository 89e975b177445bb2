"""Tries grammars out in processes that can be ended: some compile for minutes and take gigabytes.

llguidance's own limits do not cover all of it (an `allOf` of patterns takes exponential time), and a compilation can't
be stopped. So each grammar is compiled in a process of its own first, which ends when it takes too long or too much;
what passed is compiled again where it is used. `GrammarCompiler` has one of these, from its first grammar on.
"""

import itertools
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from pathlib import Path
from typing import IO

from mlx_parallm.errors import UnavailableError

SECONDS = 1.5  # for which a grammar may compile
QUICK_SECONDS = 0.2  # of its first try: most need a few milliseconds, and wait for no slow one
BYTES = 512 << 20  # that it may take meanwhile
# Of llguidance: what a matcher may hold and do for a token; its other defaults stand.
PARSER_LIMITS = {"max_lexer_states": 50_000}
START_SECONDS = 60.0  # a large vocabulary takes seconds to read
_PATIENCE = 10.0  # for a response, beyond the limit

_WORKER = Path(__file__).with_name("grammar_worker.py")


class GrammarProcess:
    """Any thread may call `try_out`; the process starts at the first call, and again if it has gone."""

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: Collection[int]) -> None:
        self._setup = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "end_ids": sorted(end_ids),
            "limits": PARSER_LIMITS,
            "bytes": BYTES,
        }
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, Future[str | None]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def try_out(self, grammar: str, seconds: float = SECONDS) -> str | None:
        """Returns what is wrong with a grammar, empty if nothing is; None where it takes longer or too much memory."""
        number = next(self._numbers)
        response: Future[str | None] = Future()
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            self._waiting[number] = response
            try:
                process.stdin.write(json.dumps({"number": number, "grammar": grammar, "seconds": seconds}) + "\n")
                process.stdin.flush()
            except OSError:
                self._fail_all(process)
        try:
            return response.result(SECONDS + _PATIENCE)
        except WaitTimeoutError:
            process.kill()
            raise UnavailableError("the process that checks grammars does not answer: try again") from None
        finally:
            self._waiting.pop(number, None)

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-I", str(_WORKER)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        ready: Future[str | None] = Future()
        self._waiting[0] = ready
        weakref.finalize(self, _end, process)
        reader = threading.Thread(target=_read, args=(weakref.ref(self), process, process.stdout), daemon=True)
        reader.start()
        try:
            process.stdin.write(json.dumps(self._setup) + "\n")
            process.stdin.flush()
            ready.result(START_SECONDS)
        except (OSError, WaitTimeoutError):
            process.kill()
            raise UnavailableError("the process that checks grammars did not start: try again") from None
        return process

    def answered(self, number: int, error: str | None) -> None:
        response = self._waiting.pop(number, None)
        if response is not None:
            response.set_result(error)

    def _fail_all(self, process: "subprocess.Popen[str]") -> None:
        """Its process has ended."""
        if process is not self._process:
            return
        while self._waiting:
            _, response = self._waiting.popitem()
            response.set_exception(UnavailableError("the process that checks grammars has ended: try again"))


def _read(owner: "weakref.ref[GrammarProcess]", process: "subprocess.Popen[str]", output: IO[str]) -> None:
    """Holds no reference while it waits: the process ends with who uses it."""
    with output:
        for line in output:
            number, error = json.loads(line)
            if (user := owner()) is not None:
                user.answered(number, error)
            del user
    process.wait()
    _end(process)
    if (user := owner()) is not None:
        user._fail_all(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """Its input is at an end, and so it ends itself."""
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:
        process.kill()
