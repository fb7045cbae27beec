# SPDX-License-Identifier: Apache-2.0
"""All-reduces on CPU processes for the trial: one that is right, and ways in which one is not."""

import os
import time

import torch
import torch.distributed
from all_reduce_trial import Trial

CPU = torch.device("cpu")


def _sum(mine: torch.Tensor) -> torch.Tensor:
    total = mine.clone()
    torch.distributed.all_reduce(total)
    return total


def right(ordinal: int) -> Trial:
    return Trial(CPU, _sum)


def wrong_on_the_second(ordinal: int) -> Trial:
    """Peers' data does not arrive on one rank, as through a patched driver."""

    def keep_mine(mine: torch.Tensor) -> torch.Tensor:
        _sum(mine)
        return mine

    return Trial(CPU, keep_mine if ordinal == 1 else _sum)


def spinning(ordinal: int) -> Trial:
    def spin(mine: torch.Tensor) -> torch.Tensor:
        time.sleep(600)
        return mine

    return Trial(CPU, spin)


def dying(ordinal: int) -> Trial:
    os._exit(7)


def unused(ordinal: int) -> None:
    return None
