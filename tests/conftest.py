# SPDX-License-Identifier: Apache-2.0
"""Fixtures that more than one test file uses, and the profile of properties."""

import os

import pytest
from hypothesis import settings

from vllm.pre_ampere import environment

# Values are tested here, not times: on a busy machine an example may take any.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of our variables is set, and what the code under test sets is undone afterwards."""
    for variable in environment.OURS:
        # Set first: monkeypatch then remembers to remove what the code sets, too.
        monkeypatch.setenv(variable.name, "0")
        monkeypatch.delenv(variable.name)
    for name in ("TORCH_COMPILE_DISABLE", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        monkeypatch.delenv(name, raising=False)
    assert not any(variable.name in os.environ for variable in environment.OURS)
    return monkeypatch
