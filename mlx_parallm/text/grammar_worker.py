"""The program of `grammar_process`: tries grammars out, each in a process with a limit of time and memory.

Run as a file, without the package around it: it needs llguidance alone. It reads a line of JSON with a tokenizer, then
a line for each grammar, and writes a line for each: its number, and what is wrong with it. It ends with its input.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

import llguidance

NICENESS = 5  # those who generate go first
WALL = 2.0  # times the limit of CPU time, however little of a core there is
MOST_ERROR = 2_000  # bytes: a line of output stays within what a pipe takes in one piece


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(setup["tokenizer"], setup["vocab_size"], setup["end_ids"])
    limits = llguidance.LLParserLimits(**setup["limits"])
    running: dict[int, int] = {}  # numbers of grammars by their processes

    def reap(*_: Any) -> None:
        while running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            number = running.pop(process, None)
            if number is not None and status:  # it ended before it could tell
                say(number, None)

    signal.signal(signal.SIGCHLD, reap)
    say(0, "")
    while line := sys.stdin.readline():
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        process = os.fork()
        if not process:
            try:
                try_out(tokenizer, limits, request, setup)
            finally:
                os._exit(1)
        running[process] = request["number"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def try_out(tokenizer: Any, limits: Any, request: dict[str, Any], setup: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # of CPU: a busy machine makes no grammar complex
    signal.setitimer(signal.ITIMER_REAL, WALL * request["seconds"])
    if sys.platform == "linux":  # elsewhere the time limits the memory
        limit = virtual_memory() + setup["bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # what a failed allocation says of itself
    matcher = llguidance.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    say(request["number"], matcher.get_error())
    os._exit(0)


def virtual_memory() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def say(number: int, error: str | None) -> None:
    """`error`: empty, what is wrong, or None where a limit was reached."""
    if error is not None:
        error = error.encode()[:MOST_ERROR].decode("utf-8", "ignore")
    os.write(1, json.dumps([number, error], ensure_ascii=False).encode()[:4_000] + b"\n")


if __name__ == "__main__":
    main()
