"""Starts a group again when it has ended by itself: `python -m mlx_parallm.cluster.parallel.supervisor COMMAND`.

A rank that dies takes its group with it: `mlx.launch` ends the others, and returns. This runs the launch command in a
session of its own and runs it anew, until a signal says to stop; that goes to all of the session's processes.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

FIRST_PAUSE = 1.0  # seconds before a restart; doubled each time …
LONGEST_PAUSE = 30.0
STEADY_SECONDS = 60.0  # … until a group has run for so long
USAGE = "usage: python -m mlx_parallm.cluster.parallel.supervisor mlx.launch [FLAGS] mlx_parallm_serve [FLAGS]\n"


class Supervisor:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Runs the group, and starts it again when it ends, until a signal; returns the exit code of the last group."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        pause = FIRST_PAUSE
        while True:
            begun = time.monotonic()
            # mlx.launch reads its standard input: a pipe that is never written to keeps it waiting.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            code = self._process.wait()
            if self._stopping:
                return code
            _end_session(self._process.pid, signal.SIGKILL)
            pause = FIRST_PAUSE if time.monotonic() - begun > STEADY_SECONDS else min(2 * pause, LONGEST_PAUSE)
            sys.stderr.write(f"the group has ended with status {code}: it is started again in {pause:g} s\n")
            if self._is_stopped_within(pause):
                return code

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            _end_session(self._process.pid, number)

    def _is_stopped_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._stopping


def _end_session(leader: int, number: int) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        sys.stderr.write(USAGE)
        return 2
    return Supervisor(argv).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
