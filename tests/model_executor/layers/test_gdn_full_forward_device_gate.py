# SPDX-License-Identifier: Apache-2.0
"""Fix 4: the eager wrapper is armed by the rank's own device, and on Volta only."""

import json
from pathlib import Path

import pytest
import torch

from vllm.pre_ampere.devices import Device, current_device
from vllm.pre_ampere.gdn.full_forward import (
    FullForwardGate,
    full_forward_gate,
    write_rank_record,
)

TURING = Device(0, "Quadro RTX 8000", (7, 5))
VOLTA = Device(2, "Tesla V100-SXM2-32GB", (7, 0))
XAVIER = Device(0, "Jetson AGX Xavier", (7, 2))
AMPERE = Device(0, "NVIDIA A100", (8, 0))


@pytest.fixture
def policy(clean_environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    clean_environment.setenv("VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH", "1")
    return clean_environment


@pytest.mark.parametrize(
    ("device", "armed"),
    [
        pytest.param(TURING, False, id="turing"),
        pytest.param(AMPERE, False, id="ampere"),
        pytest.param(VOLTA, True, id="volta"),
        pytest.param(XAVIER, True, id="xavier"),
    ],
)
def test_automatic_arming_is_voltas(
    policy: pytest.MonkeyPatch, device: Device, armed: bool
) -> None:
    gate = full_forward_gate(device, speculative=True)
    assert gate == FullForwardGate(volta=device.is_volta, auto=True, armed=armed)


def test_mixed_node_answers_for_the_current_device(policy: pytest.MonkeyPatch) -> None:
    """Four ranks see the same four cards; only the current device differs."""
    box = [TURING, TURING, VOLTA, VOLTA]
    armed = []
    for rank in range(4):
        policy.setattr(torch.accelerator, "current_device_index", lambda rank=rank: rank)
        armed.append(full_forward_gate(current_device(box), speculative=True).armed)
    assert armed == [False, False, True, True]


@pytest.mark.parametrize("device", [TURING, VOLTA, AMPERE])
@pytest.mark.parametrize(("value", "armed"), [("1", True), ("0", False)])
@pytest.mark.parametrize("speculative", [True, False])
def test_an_explicit_setting_wins_on_any_device(
    policy: pytest.MonkeyPatch, device: Device, value: str, armed: bool, speculative: bool
) -> None:
    policy.setenv("VLLM_SM70_QWEN_GDN_FULL_FORWARD", value)
    assert full_forward_gate(device, speculative).armed is armed


def test_without_speculation_or_without_the_policy_nothing_is_armed(
    policy: pytest.MonkeyPatch,
) -> None:
    assert full_forward_gate(VOLTA, speculative=False) == FullForwardGate(True, False, False)
    policy.delenv("VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH")
    assert full_forward_gate(VOLTA, speculative=True) == FullForwardGate(True, False, False)


@pytest.mark.parametrize("speculative", [True, False], ids=["k3", "k0"])
@pytest.mark.parametrize(
    ("device", "armed"),
    [(VOLTA, True), (TURING, False), (AMPERE, False)],
    ids=["volta", "turing", "ampere"],
)
def test_with_batch_invariance_speculation_changes_no_rounding(
    policy: pytest.MonkeyPatch, device: Device, armed: bool, speculative: bool
) -> None:
    """An eager layer rounds otherwise than a compiled one, so Volta has one or the other."""
    policy.setenv("VLLM_BATCH_INVARIANT", "1")
    gate = full_forward_gate(device, speculative)
    assert gate == FullForwardGate(device.is_volta, auto=speculative, armed=armed)
    policy.delenv("VLLM_SM70_FLASH_V100_0DOT3_COMPILE_GRAPH")
    assert not full_forward_gate(device, speculative).armed


def test_a_rank_writes_what_it_is_and_what_it_armed(
    policy: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_rank_record(VOLTA, full_forward_gate(VOLTA, True), rank=2)
    assert list(tmp_path.iterdir()) == []
    policy.setenv("VLLM_PRE_AMPERE_RANK_RECORD_DIR", str(tmp_path / "records"))
    write_rank_record(TURING, full_forward_gate(TURING, True), rank=0)
    write_rank_record(VOLTA, full_forward_gate(VOLTA, True), rank=2)
    records = [json.loads((tmp_path / "records" / f"rank{r}.json").read_text()) for r in (0, 2)]
    assert [(r["device"], r["capability"], r["volta"], r["auto"], r["maybe"]) for r in records] == [
        (0, [7, 5], False, True, False),
        (2, [7, 0], True, True, True),
    ]
