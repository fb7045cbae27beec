# SPDX-License-Identifier: Apache-2.0
"""What a command starts ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm.pre_ampere.cli import processes

# Starts a child that ignores SIGTERM, says both ids, and waits.
ENGINE = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\nprint(1, flush=True)\\ntime.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
COMMAND = f"""
import sys
from pathlib import Path
from vllm.pre_ampere.cli import processes
processes._SECONDS_TO_END = 1.0
with Path(sys.argv[1]).open("w") as log:
    with processes.engine([sys.executable, "-c", {ENGINE!r}], log) as process:
        print(process.stdout.readline(), flush=True)
        process.wait()
"""


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_command_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert command.stdout is not None
    started = [int(word) for word in command.stdout.readline().split()]
    assert len(started) == 2
    assert all(running(process) for process in started)
    command.send_signal(number)
    status = command.wait(30)
    assert status in (128 + number, -number, 1)
    deadline = time.monotonic() + 5
    while any(running(process) for process in started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(running(process) for process in started)


def test_signals_do_again_what_they_did(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (tmp_path / "log").open("w") as log:
        with processes.engine([sys.executable, "-c", "print(7)"], log) as process:
            assert signal.getsignal(signal.SIGTERM) is not before
            assert process.stdout is not None
            assert process.stdout.read() == "7\n"
        assert signal.getsignal(signal.SIGTERM) is before
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
