# SPDX-License-Identifier: Apache-2.0
"""Upstream's custom all-reduce is tried before it is trusted.

On some PCIe boxes it spins for ever at start-up, and through a patched peer-to-peer driver it
returns wrong sums, while the driver reports peer access and copies arrive. Upstream (vLLM 0.32)
trusts the driver's report (`VLLM_SKIP_P2P_CHECK` is 1 by default) and its own check, if asked for,
copies and does not reduce. Here processes of their own run the all-reduce itself and compare the
sums. The trial can only veto: nothing is turned on by it.
"""

import contextlib
import functools
import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards.action import Action

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PROGRAM = Path(__file__).with_name("all_reduce_trial.py")
_OPERATOR = "vllm.pre_ampere.guards.all_reduce_trial:custom_all_reduce"

# Starting a process that imports vLLM takes half a minute on a slow disk; the sums take a second.
START_SECONDS = 180.0
RUN_SECONDS = 30.0


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    Attributes:
        veto: whether the all-reduce must not be used.
        reason: what was seen.
    """

    veto: bool
    reason: str


def judge(
    findings: Mapping[int, str], exit_statuses: Mapping[int, int], unfinished: Sequence[int]
) -> Verdict:
    """Turn what the ranks said into a verdict.

    Args:
        findings: by rank, of those that said something: "right", "unused", or what was wrong.
        exit_statuses: by rank, of those that ended by themselves.
        unfinished: ranks that had to be ended.
    """
    wrong = {rank: f for rank, f in findings.items() if f not in ("right", "unused")}
    if wrong:
        rank, finding = next(iter(sorted(wrong.items())))
        return Verdict(True, f"it returned wrong data: on rank {rank}, {finding}")
    failed = {rank: status for rank, status in exit_statuses.items() if status != 0}
    if failed:
        rank, status = next(iter(sorted(failed.items())))
        return Verdict(True, f"rank {rank} of the trial ended with status {status}")
    if unfinished:
        ranks = ", ".join(map(str, sorted(unfinished)))
        return Verdict(True, f"it did not finish in time on rank {ranks}")
    if "unused" in findings.values():
        return Verdict(False, "upstream does not use it here")
    return Verdict(False, "its sums were right")


def run_trial(
    operator: str,
    world_size: int,
    first_device: int = 0,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
    run_seconds: float = RUN_SECONDS,
) -> Verdict:
    """Try an all-reduce in `world_size` processes, one a rank.

    Args:
        operator: what is tried; see all_reduce_trial.py.
        world_size: ranks.
        first_device: CUDA's number of rank 0's card; the other ranks take those after it.
        environment: of the processes; this one's where None.
        start_seconds: for all ranks to meet.
        run_seconds: for all sums after that.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-pre-ampere-") as folder:
        rendezvous = str(Path(folder) / "rendezvous")

        def numbers(rank: int) -> list[str]:
            return [str(number) for number in (rank, world_size, first_device)]

        processes = [
            subprocess.Popen(
                # -P: the folder of this file is no place to import from.
                [sys.executable, "-P", str(_PROGRAM), operator, *numbers(rank), rendezvous],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=None if environment is None else dict(environment),
            )
            for rank in range(world_size)
        ]
        try:
            findings = _listen(processes, start_seconds, run_seconds)
        finally:
            unfinished = [rank for rank, process in enumerate(processes) if process.poll() is None]
            for process in processes:
                process.kill()
                process.wait()
        statuses = {
            rank: process.returncode
            for rank, process in enumerate(processes)
            if rank not in unfinished
        }
    return judge(findings, statuses, unfinished)


def _listen(
    processes: Sequence["subprocess.Popen[str]"], start_seconds: float, run_seconds: float
) -> dict[int, str]:
    """Collect findings until every rank has ended, or time is up."""
    findings: dict[int, str] = {}
    ready: set[int] = set()
    ended: list[int] = []
    deadline = time.monotonic() + start_seconds
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank, stream = key.data
                event = _next_event(stream)
                if event is None:
                    selector.unregister(stream)
                    ended.append(rank)
                elif "finding" in event:
                    findings[rank] = str(event["finding"])
                elif "ready" in event:
                    ready.add(rank)
                    if len(ready) == len(processes):
                        deadline = time.monotonic() + run_seconds
    # A rank that has closed its output gets a moment to end, so that its own status is known.
    for rank in ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[rank].wait(5)
    return findings


def _next_event(stream: IO[str]) -> dict[str, object] | None:
    """The next event, {} for a line that is none, None at the end of the stream."""
    line = stream.readline()
    if not line:
        return None
    return dict(json.loads(line)) if line.startswith("{") else {}


@functools.cache
def _verdict(world_size: int, first_device: int) -> Verdict:
    return run_trial(_OPERATOR, world_size, first_device)


def check(vllm_config: "VllmConfig", devices: Sequence[Device]) -> Action | None:
    """Turn the custom all-reduce off where a trial fails, one for each tensor-parallel group."""
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if (
        parallel.disable_custom_all_reduce
        or current_platform.is_cpu()
        or parallel.nnodes > 1
        or not 1 < ranks <= len(devices)
    ):
        return None
    groups = range(0, len(devices) - ranks + 1, ranks)
    verdict = next((v for first in groups if (v := _verdict(ranks, first)).veto), None)
    if verdict is None:
        return None
    parallel.disable_custom_all_reduce = True
    return Action(
        "all-reduce",
        f"Custom all-reduce is off for {ranks} cards",
        f"tried before use, {verdict.reason}",
        "NCCL does the sums; look at the box's peer-to-peer set-up (IOMMU, ACS, patched driver), "
        "or pass --disable-custom-all-reduce to skip the trial",
    )
