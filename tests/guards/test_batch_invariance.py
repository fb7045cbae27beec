# SPDX-License-Identifier: Apache-2.0
"""`VLLM_BATCH_INVARIANT=1`: two servers of a model sum the rows of a norm in the same order."""

import pytest
from vllm.config import CompilationConfig, VllmConfig

from vllm.pre_ampere.guards.configuration import choose_reductions_by_rule


def config(**inductor: object) -> VllmConfig:
    return VllmConfig(compilation_config=CompilationConfig(inductor_compile_config=inductor))


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_is_done_unasked(clean_environment: pytest.MonkeyPatch, value: str | None) -> None:
    clean_environment.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        clean_environment.setenv("VLLM_BATCH_INVARIANT", value)
    made = config()
    assert choose_reductions_by_rule(made) is None
    assert "deterministic" not in made.compilation_config.inductor_compile_config


def test_reductions_are_not_timed(clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.setenv("VLLM_BATCH_INVARIANT", "1")
    made = config()
    for _ in range(2):
        action = choose_reductions_by_rule(made)
        assert action is not None
        assert action.did.startswith("Inductor chooses the configurations of its reductions")
    chosen = made.compilation_config.inductor_compile_config
    assert chosen["deterministic"] is True
    assert chosen["benchmark_combo_kernel"] is False


def test_the_users_wish_stays(clean_environment: pytest.MonkeyPatch) -> None:
    clean_environment.setenv("VLLM_BATCH_INVARIANT", "1")
    made = config(deterministic=False)
    action = choose_reductions_by_rule(made)
    assert action is not None
    assert "deterministic=False was asked for beside VLLM_BATCH_INVARIANT=1" in action.reason
    assert made.compilation_config.inductor_compile_config["deterministic"] is False
