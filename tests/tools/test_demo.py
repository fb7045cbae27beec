# SPDX-License-Identifier: Apache-2.0
"""What `make demo` says and does when something is wrong; that it works, it shows by itself."""

import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest

TOOL = Path(demo.__file__)


def result(*texts: str) -> demo.Result:
    return demo.Result(texts=texts, tokens=10, seconds=2.0, acceptance_length=None)


def test_hash_tells_answers_apart() -> None:
    assert result("ab", "c").sha256 == result("ab", "c").sha256
    assert result("ab", "c").sha256 != result("a", "bc").sha256


@pytest.mark.parametrize(("third", "equal"), [("same", True), ("other", False)])
def test_report_says_whether_the_answers_are_equal(
    capsys: pytest.CaptureFixture[str], third: str, equal: bool
) -> None:
    answers = {"without": result("a", "b", "same"), "with": result("a", "b", third)}
    assert demo.report(answers) is equal
    shown = capsys.readouterr().out
    assert ("NO" in shown) is not equal
    assert ("other" in shown) is not equal
    assert shown.count("5.0") == 2


def test_end_ends_what_the_server_started() -> None:
    """A child of the server that ignores SIGTERM is gone, too."""
    child = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    server = subprocess.Popen(
        ["bash", "-c", f'bash -c "{child}" & wait'],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    demo.end(server)
    # The pipe is at its end only once nobody is left to write to it.
    begin = time.monotonic()
    assert server.stdout.read() == b""
    assert time.monotonic() - begin < 5


def test_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    """Nothing is served from an empty directory: exit status 1, and the end of the server's log."""
    done = subprocess.run(
        [sys.executable, str(TOOL), "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "no speculation: vllm serve ended with status 1" in done.stdout
    assert str(tmp_path) in done.stdout
    assert "All of it: build/demo/no-speculation.log" in done.stdout
