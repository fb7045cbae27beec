# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs GDN prefill, and why not the others.

The platform asks here while upstream's configuration module is still loading, so nothing of it is
imported at the top. The choice is made by need: a kernel states what it asks of a card, the
registry compares. The default on Turing therefore never asks for more shared memory than a Turing
block has.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.kernels import registry
from vllm.pre_ampere.kernels.kernel import Problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.pre_ampere.gdn.prefill")

OPERATION = "gdn_prefill"


def add_backend_choices(parser: ArgumentParser) -> None:
    """Let `--gdn-prefill-backend` take our kernels' names beside upstream's."""
    for action in parser._actions:
        if action.dest == "gdn_prefill_backend" and action.choices is not None:
            known = list(action.choices)
            action.choices = known + [n for n in registry.names(OPERATION) if n not in known]


def requested_backend(vllm_config: "VllmConfig") -> str | None:
    """The backend that the user named; None where the choice is ours."""
    additional = vllm_config.additional_config
    name = additional.get("gdn_prefill_backend") if isinstance(additional, dict) else None
    return None if name in (None, "auto") else str(name)


def prefill_problem(vllm_config: "VllmConfig") -> Problem | None:
    """What the model's GDN layers ask of a prefill kernel; None for a model without GDN layers."""
    text_config = vllm_config.model_config.hf_text_config
    head_dim_k = getattr(text_config, "linear_key_head_dim", None)
    if head_dim_k is None:
        return None
    return Problem(
        operation=OPERATION,
        dtype=vllm_config.model_config.dtype,
        head_dim_k=head_dim_k,
        head_dim_v=text_config.linear_value_head_dim,
    )


def _resolve_gdn_prefill_backend(
    problem: Problem, device: Device, requested: str | None, on_cpu: bool
) -> registry.Selection:
    """Choose the prefill kernel for one card, and say once why a better one was passed over.

    Raises:
        registry.KernelUnavailableError: the requested kernel cannot run on this card.
    """
    selection = registry.select(OPERATION, problem, device, requested, on_cpu=on_cpu)
    for kernel, reason in selection.passed_over:
        if on_cpu and kernel.unmet(problem, device, on_cpu=False) is None:
            continue  # The card would take it; only this box has none.
        logger.warning_once("%s %s; using %s", kernel.name, reason, selection.kernel.name)
    return selection


def check_requested_backend(
    vllm_config: "VllmConfig", devices: Sequence[Device], on_cpu: bool
) -> None:
    """Refuse a backend asked for by name that a participating card cannot run.

    Called where the configuration is made, before any weights load.

    Raises:
        registry.KernelUnavailableError: names the setting, the card and what would work.
    """
    requested = requested_backend(vllm_config)
    if requested is None or vllm_config.model_config is None:
        return
    problem = prefill_problem(vllm_config)
    if problem is None:
        return
    for device in devices:
        registry.select(OPERATION, problem, device, requested, on_cpu=on_cpu)
