# SPDX-License-Identifier: Apache-2.0
"""Processes that a command starts end with it, however it ends."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import IO

_SECONDS_TO_END = 20.0


@contextlib.contextmanager
def engine(command: Sequence[str], log: IO[str]) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that starts others; at the end all of them are gone.

    They get a process group of their own. A signal that would end this process ends it as an
    exception, so that they are ended first; they have 20 s to do so by themselves.

    Args:
        command: what to run; its standard output is a pipe.
        log: where its standard error goes.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            _end_group(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_group(process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _SECONDS_TO_END
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
