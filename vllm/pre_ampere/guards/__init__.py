# SPDX-License-Identifier: Apache-2.0
"""Known traps of these cards, met where the configuration is made, before any weights load.

Each guard looks at the finished configuration and the cards that take part, changes what would go
wrong, and says in one line what it did, why, and what the user can do. What the user chose is left
alone, and refused with an error only where it would give wrong answers. docs/guards.md has the
whole list, with the traps that upstream has closed since and for which there is only a test.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards import all_reduce, configuration, quantized_refusals
from vllm.pre_ampere.guards.action import Action

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.pre_ampere.guards")


def check(vllm_config: "VllmConfig", devices: Sequence[Device]) -> tuple[Action, ...]:
    """Run every guard on a finished configuration, and say what each did.

    Idempotent: upstream completes a configuration more than once, in more than one process.

    Args:
        vllm_config: modified in place.
        devices: the cards that take part.

    Raises:
        ValueError: the checkpoint's quantised layers do not load on one of the cards.
    """
    quantized_refusals.refuse_layers(vllm_config, devices)
    actions = (
        configuration.fail_requests_with_nan_logits(vllm_config),
        configuration.choose_reductions_by_rule(vllm_config),
        configuration.say_where_prompts_are_split(vllm_config),
        configuration.say_that_tensor_cores_are_missing(vllm_config, devices),
        all_reduce.check(vllm_config, devices),
    )
    done = tuple(action for action in actions if action is not None)
    for action in done:
        logger.info_once("%s", action)
    return done
