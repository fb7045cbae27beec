# SPDX-License-Identifier: Apache-2.0
"""One rank of a trial of an all-reduce; run as a program by `all_reduce`, never imported by it.

    python all_reduce_trial.py OPERATOR RANK WORLD_SIZE FIRST_DEVICE RENDEZVOUS

OPERATOR is `module:function`; the function takes CUDA's number of the rank's device, which is
FIRST_DEVICE + RANK, and returns a `Trial`, or None where the all-reduce would not be used anyway.
What the rank finds goes to standard output, a JSON object a line: {"ready": true} once all ranks
have met, then {"finding": ...}.
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed

# From one row of a small model to the largest sum that upstream's custom all-reduce takes, 8 MiB.
_ELEMENTS = (1024, 4096, 65536, 1048576, 4194304)
_REPEATS = 4


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Attributes:
        device: where its tensors live.
        all_reduce: returns the sum over all ranks of a float16 tensor.
    """

    device: torch.device
    all_reduce: Callable[[torch.Tensor], torch.Tensor]


def values(elements: int, rank: int, repeat: int) -> torch.Tensor:
    """What a rank contributes: small integers, whose sum over any ranks is exact in float16."""
    return ((torch.arange(elements) * 7 + rank * 13 + repeat) % 17).to(torch.float16)


def find(trial: Trial, rank: int, world_size: int) -> str:
    """Run the all-reduce and say "right", or what was wrong."""
    for elements in _ELEMENTS:
        for repeat in range(_REPEATS):
            mine = values(elements, rank, repeat).to(trial.device)
            total = trial.all_reduce(mine).cpu()
            expected = sum(values(elements, other, repeat) for other in range(world_size))
            wrong = int((total != expected).sum())
            if wrong:
                return f"{wrong} of {elements} sums are wrong"
    return "right"


def custom_all_reduce(ordinal: int) -> Trial | None:
    """Upstream's custom all-reduce, eagerly and from a CUDA graph."""
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    device = torch.device("cuda", ordinal)
    torch.accelerator.set_device_index(ordinal)
    group = torch.distributed.group.WORLD
    communicator = CustomAllreduce(group, device)
    if communicator.disabled:
        return None

    def run(mine: torch.Tensor) -> torch.Tensor:
        eager = communicator.custom_all_reduce(mine)
        # The communicator leaves to NCCL what it does not take; nothing is tried there.
        return replay(mine) if eager is not None else reference(mine)

    def replay(mine: torch.Tensor) -> torch.Tensor:
        graph = torch.cuda.CUDAGraph()
        source = torch.zeros_like(mine)
        with communicator.capture(), torch.cuda.graph(graph):
            total = communicator.custom_all_reduce(source)
        source.copy_(mine)
        graph.replay()
        torch.accelerator.synchronize()
        eager = communicator.custom_all_reduce(mine)
        # A sum that only one of the two ways gets right is wrong.
        return torch.where(total == eager, total, torch.nan)

    def reference(mine: torch.Tensor) -> torch.Tensor:
        total = mine.cpu()
        torch.distributed.all_reduce(total)
        return total

    return Trial(device, run)


def main() -> None:
    """Meet the other ranks, try, and report."""
    operator, *numbers, rendezvous = sys.argv[1:]
    rank, world_size, first_device = map(int, numbers)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    module, _, name = operator.partition(":")
    trial = getattr(importlib.import_module(module), name)(first_device + rank)
    torch.distributed.barrier()
    print(json.dumps({"ready": True}), flush=True)
    finding = "unused" if trial is None else find(trial, rank, world_size)
    print(json.dumps({"finding": finding}), flush=True)


if __name__ == "__main__":
    main()
