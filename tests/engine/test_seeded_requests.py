# SPDX-License-Identifier: Apache-2.0
"""A request with a seed gives the same tokens however many steps its prompt takes, on a CPU, too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_process import START_SECONDS, TINY_MODEL, clean_environment


@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_split_among_steps_draws_from_the_seed_as_one_that_is_not(k: int) -> None:
    """Upstream's CPU runner ends the engine at the first token that it throws away."""
    program = Path(__file__).with_name("seeded_requests.py")
    done = subprocess.run(
        [sys.executable, str(program), str(TINY_MODEL), str(k)],
        env=clean_environment("7.5"),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, (done.stdout + done.stderr)[-6000:]
    answers = json.loads(lines[0].removeprefix("RESULT "))
    assert answers["together"] == answers["alone"]
    assert len({tuple(tokens) for tokens in answers["alone"]}) == 3
    assert all(len(tokens) == 24 for tokens in answers["alone"])
