# SPDX-License-Identifier: Apache-2.0
"""Fix 1: the prefill backend is chosen by what the card has, and the reason is said once."""

import argparse
import logging

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm.pre_ampere.devices import Capability, Device
from vllm.pre_ampere.gdn import prefill
from vllm.pre_ampere.kernels import registry
from vllm.pre_ampere.kernels.kernel import Problem

VOLTA, XAVIER, TURING, AMPERE = (7, 0), (7, 2), (7, 5), (8, 0)


def device(capability: Capability, name: str = "a card") -> Device:
    return Device(0, name, capability)


def problem(head_dim: int = 128, dtype: torch.dtype = torch.float16) -> Problem:
    return Problem(prefill.OPERATION, dtype, head_dim_k=head_dim, head_dim_v=head_dim)


def resolve(card: Device, requested: str | None = None, on_cpu: bool = False) -> registry.Selection:
    return prefill._resolve_gdn_prefill_backend(problem(), card, requested, on_cpu)


def reason_against(name: str, card: Device) -> str:
    passed_over = {kernel.name: reason for kernel, reason in resolve(card).passed_over}
    return passed_over[name]


@pytest.mark.parametrize("name", ["Quadro RTX 8000", "Tesla T4"])
def test_turing_is_refused_flashqla_with_both_numbers(name: str) -> None:
    reason = reason_against("flashqla_sm70", device(TURING, name))
    assert reason == (
        f"needs 86016 B of shared memory a block; this card (sm75, {name}) has 65536 B"
    )


def test_turing_takes_triton() -> None:
    assert resolve(device(TURING)).kernel.name == "triton"


@pytest.mark.parametrize("capability", [VOLTA, XAVIER])
def test_volta_has_room_for_flashqla(capability: Capability) -> None:
    reason = reason_against("flashqla_sm70", device(capability))
    assert "shared memory" not in reason


def test_the_default_never_needs_more_shared_memory_than_the_card_has() -> None:
    for capability in (VOLTA, XAVIER, TURING, AMPERE):
        card = device(capability)
        need = resolve(card).kernel.shared_memory
        assert need is None or need[128, 128] <= card.shared_memory_per_block


def test_the_reason_is_a_warning_that_ends_with_what_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger=prefill.logger.name):
        resolve(device(TURING, "the only card of this name"))
    assert [record.getMessage() for record in caplog.records] == [
        "flashqla_sm70 needs 86016 B of shared memory a block; this card (sm75, the only card of "
        "this name) has 65536 B; using triton"
    ]


def test_asking_by_name_for_what_the_card_cannot_run_is_an_error() -> None:
    with pytest.raises(registry.KernelUnavailableError) as error:
        resolve(device(TURING), "flashqla_sm70")
    message = str(error.value)
    assert "--gdn-prefill-backend flashqla_sm70" in message
    assert "86016 B" in message
    assert "65536 B" in message
    assert "triton" in message


@pytest.mark.parametrize("name", ["vlk", "flashinfer", "cutedsl", "no such kernel"])
def test_a_backend_that_does_not_exist_here_is_an_error_by_name(name: str) -> None:
    with pytest.raises(registry.KernelUnavailableError, match=f"--gdn-prefill-backend {name}"):
        resolve(device(TURING), name)


def test_head_dimensions_of_another_model_fall_back_and_say_why() -> None:
    selection = registry.select(prefill.OPERATION, problem(head_dim=64), device(VOLTA))
    reasons = {kernel.name: reason for kernel, reason in selection.passed_over}
    assert selection.kernel.name == "triton"
    assert reasons["flashqla_sm70"] == "takes K=128, V=128; the model has K=64, V=64"


def test_a_box_that_computes_on_its_cpu_takes_the_reference() -> None:
    assert resolve(device(TURING), on_cpu=True).kernel.name == "reference"


def test_the_command_line_takes_every_backend_of_ours_and_of_upstream() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    upstream = choices(parser)
    prefill.add_backend_choices(parser)
    prefill.add_backend_choices(parser)
    assert choices(parser) == [*upstream, "flashqla_sm70", "vlk", "reference"]
    assert parser.parse_args(["--gdn-prefill-backend", "vlk"]).gdn_prefill_backend == "vlk"


def choices(parser: argparse.ArgumentParser) -> list[str]:
    action = next(a for a in parser._actions if a.dest == "gdn_prefill_backend")
    assert action.choices is not None
    return list(action.choices)
