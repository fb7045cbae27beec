# SPDX-License-Identifier: Apache-2.0
"""`VLLM_BATCH_INVARIANT=1`: what is chosen with it, and what is said of what it does not reach."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CompilationMode, VllmConfig

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards.configuration import (
    choose_reductions_by_rule,
    say_that_tensor_cores_are_missing,
    say_where_prompts_are_split,
)


def config(mode: CompilationMode | None = None, **inductor: object) -> VllmConfig:
    compilation = CompilationConfig(mode=mode, inductor_compile_config=inductor)
    return VllmConfig(compilation_config=compilation)


@pytest.fixture
def asked(clean_environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    clean_environment.setenv("VLLM_BATCH_INVARIANT", "1")
    return clean_environment


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_is_done_unasked(clean_environment: pytest.MonkeyPatch, value: str | None) -> None:
    clean_environment.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        clean_environment.setenv("VLLM_BATCH_INVARIANT", value)
    made = config()
    assert choose_reductions_by_rule(made) is None
    assert "deterministic" not in made.compilation_config.inductor_compile_config


@pytest.mark.usefixtures("asked")
def test_reductions_are_not_timed() -> None:
    made = config()
    for _ in range(2):
        action = choose_reductions_by_rule(made)
        assert action is not None
        assert action.did.startswith("Inductor chooses the configurations of its reductions")
    chosen = made.compilation_config.inductor_compile_config
    assert chosen["deterministic"] is True
    assert chosen["benchmark_combo_kernel"] is False


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("value", [1, True, "true"])
def test_what_inductor_takes_for_true_is_true(value: object) -> None:
    made = config(deterministic=value)
    action = choose_reductions_by_rule(made)
    assert action is not None
    assert action.did.startswith("Inductor chooses the configurations of its reductions")
    assert made.compilation_config.inductor_compile_config["benchmark_combo_kernel"] is False


@pytest.mark.usefixtures("asked")
def test_the_users_wish_stays() -> None:
    made = config(deterministic=False)
    action = choose_reductions_by_rule(made)
    assert action is not None
    assert "deterministic=False was asked for beside VLLM_BATCH_INVARIANT=1" in action.reason
    assert made.compilation_config.inductor_compile_config["deterministic"] is False


@pytest.mark.usefixtures("asked")
def test_without_compilation_there_is_nothing_to_choose() -> None:
    assert choose_reductions_by_rule(config(CompilationMode.NONE)) is None


@pytest.mark.parametrize(
    ("switch", "cached", "hybrid", "said"),
    [
        ("1", True, True, True),
        ("1", False, True, False),
        ("1", True, False, False),
        ("0", True, True, False),
    ],
)
def test_a_prefix_cache_that_splits_prompts_is_named(
    clean_environment: pytest.MonkeyPatch, switch: str, cached: bool, hybrid: bool, said: bool
) -> None:
    clean_environment.setenv("VLLM_BATCH_INVARIANT", switch)
    made: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=cached),
        model_config=SimpleNamespace(is_hybrid=hybrid),
    )
    action = say_where_prompts_are_split(made)
    assert (action is not None) is said
    if action is not None:
        assert "--no-enable-prefix-caching" in action.remedy


@pytest.mark.usefixtures("asked")
def test_a_card_without_tensor_cores_has_its_products_in_triton_then() -> None:
    gtx = Device(0, "NVIDIA GeForce GTX 1660 Ti", (7, 5))
    made: Any = SimpleNamespace(model_config=SimpleNamespace())
    assert say_that_tensor_cores_are_missing(made, [gtx]) is None
