# SPDX-License-Identifier: Apache-2.0
"""Guard 3: the custom all-reduce is tried before use, and the trial can only veto."""

import os
from pathlib import Path

import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.platforms import current_platform

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards import all_reduce
from vllm.pre_ampere.guards.all_reduce import Verdict, judge, run_trial
from vllm.pre_ampere.guards.all_reduce_trial import values

HERE = Path(__file__).parent


def trial(operator: str, run_seconds: float = 60.0) -> Verdict:
    folders = [str(HERE), str(Path(all_reduce.__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    return run_trial(
        f"all_reduce_operators:{operator}",
        2,
        environment=environment,
        run_seconds=run_seconds,
    )


def test_right_sums_pass() -> None:
    assert trial("right") == Verdict(False, "its sums were right")


def test_wrong_data_on_one_rank_is_a_veto_that_counts_the_sums() -> None:
    verdict = trial("wrong_on_the_second")
    assert verdict.veto
    # Of 1024 numbers below 17, those where rank 0 contributed 0 are right by chance.
    by_chance = int((values(1024, 0, 0) == 0).sum())
    assert verdict.reason.endswith(f"on rank 1, {1024 - by_chance} of 1024 sums are wrong")


def test_a_spinning_kernel_is_ended_and_is_a_veto() -> None:
    assert trial("spinning", run_seconds=1.0) == Verdict(
        True, "it did not finish in time on rank 0, 1"
    )


@pytest.mark.parametrize(
    ("findings", "exit_statuses", "unfinished", "veto", "reason"),
    [
        ({0: "right", 1: "right"}, {0: 0, 1: 0}, [], False, "its sums were right"),
        ({0: "unused", 1: "unused"}, {0: 0, 1: 0}, [], False, "upstream does not use it here"),
        ({0: "right"}, {0: 0, 1: -11}, [], True, "rank 1 of the trial ended with status -11"),
        ({}, {0: 0, 1: 1}, [], True, "rank 1 of the trial ended with status 1"),
        ({0: "right"}, {0: 0}, [1], True, "it did not finish in time on rank 1"),
        # What is known to be wrong is said before what is only suspicious.
        (
            {1: "5 of 1024 sums are wrong"},
            {1: 0},
            [0],
            True,
            "it returned wrong data: on rank 1, 5 of 1024 sums are wrong",
        ),
    ],
)
def test_the_verdict(
    findings: dict[int, str],
    exit_statuses: dict[int, int],
    unfinished: list[int],
    veto: bool,
    reason: str,
) -> None:
    assert judge(findings, exit_statuses, unfinished) == Verdict(veto, reason)


@pytest.mark.parametrize(
    ("operator", "verdict"),
    [
        ("dying", Verdict(True, "rank 0 of the trial ended with status 7")),
        ("unused", Verdict(False, "upstream does not use it here")),
    ],
)
def test_other_ends_of_a_trial(operator: str, verdict: Verdict) -> None:
    assert trial(operator) == verdict


def test_contributions_sum_exactly_in_float16() -> None:
    contributions = [values(4096, rank, 3) for rank in range(8)]
    exact = sum(contribution.double() for contribution in contributions)
    assert torch.equal(sum(contributions).double(), exact)


class OnCards:
    """A box with cards, for the part of the guard that decides."""

    def __init__(self, patch: pytest.MonkeyPatch, verdicts: dict[int, Verdict]) -> None:
        self.tried: list[tuple[int, int]] = []
        self._verdicts = verdicts
        patch.setattr(type(current_platform), "is_cpu", lambda _: False)
        patch.setattr(all_reduce, "_verdict", self._verdict)

    def _verdict(self, world_size: int, first_device: int) -> Verdict:
        self.tried.append((world_size, first_device))
        return self._verdicts[first_device]


PASS, VETO = Verdict(False, "its sums were right"), Verdict(True, "it did not finish in time")


def config(tensor_parallel_size: int, disabled: bool = False) -> VllmConfig:
    result = VllmConfig()
    result.parallel_config = ParallelConfig()
    # As on a GPU: on a CPU upstream itself turns it off.
    result.parallel_config.disable_custom_all_reduce = disabled
    result.parallel_config.tensor_parallel_size = tensor_parallel_size
    return result


def cards(count: int) -> list[Device]:
    return [Device(index, "Tesla T4", (7, 5)) for index in range(count)]


def test_a_veto_turns_it_off_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCards(monkeypatch, {0: VETO})
    box = config(2)
    action = all_reduce.check(box, cards(2))
    assert box.parallel_config.disable_custom_all_reduce
    assert action is not None
    assert "it did not finish in time" in str(action)
    assert "--disable-custom-all-reduce" in str(action)
    assert all_reduce.check(box, cards(2)) is None, "nothing is tried twice"


def test_each_tensor_parallel_group_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    box = OnCards(monkeypatch, {0: PASS, 2: VETO})
    two_stages = config(2)
    assert all_reduce.check(two_stages, cards(4)) is not None
    assert box.tried == [(2, 0), (2, 2)]


@pytest.mark.parametrize(
    ("box", "count"), [(config(1), 1), (config(2, disabled=True), 2)], ids=["tp1", "disabled"]
)
def test_nothing_is_tried_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch, box: VllmConfig, count: int
) -> None:
    on_cards = OnCards(monkeypatch, {})
    assert all_reduce.check(box, cards(count)) is None
    assert on_cards.tried == []


def test_a_pass_turns_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCards(monkeypatch, {0: PASS})
    box = config(2)
    assert all_reduce.check(box, cards(2)) is None
    assert box.parallel_config.disable_custom_all_reduce is False


def test_upstream_still_trusts_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard goes when upstream checks by itself that peers' data arrives."""
    from vllm import envs

    monkeypatch.delenv("VLLM_SKIP_P2P_CHECK", raising=False)
    assert envs.VLLM_SKIP_P2P_CHECK is True
