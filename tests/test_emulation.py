# SPDX-License-Identifier: Apache-2.0
"""Emulation on a newer card, as far as it shows without one: compilers real, device answers not."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.pre_ampere import emulation, environment
from vllm.pre_ampere.devices import Device, emulated_devices

HOPPER = Device(index=0, name="NVIDIA H200", capability=(9, 0))
TURING = emulated_devices([(7, 5)], 1)
VOLTA = emulated_devices([(7, 0)], 1)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the program made for a capability."""

    @functools.cache
    def run(capability: str) -> dict[str, Any]:
        program = str(Path(__file__).with_name("emulated_programs.py"))
        cache = str(tmp_path_factory.mktemp("triton"))
        answer = subprocess.run(
            [sys.executable, program, capability],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            check=True,
            capture_output=True,
            text=True,
        )
        made: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return made

    return run


@pytest.mark.parametrize(("capability", "target"), [("7.5", "sm_75"), ("7.0", "sm_70")])
def test_ptx_is_the_old_cards_and_machine_code_the_new_ones(
    capability: str, target: str, compiled: Callable[[str], dict[str, Any]]
) -> None:
    assert compiled(capability)["Triton's own"] == {
        "ptx_target": [target],
        "cubin_architecture": 90,
        "matrix_instructions": [],
    }


def test_the_tensor_core_lowering_works_below_emulation(
    compiled: Callable[[str], dict[str, Any]],
) -> None:
    assert compiled("7.5")["tensor cores"] == {
        "ptx_target": ["sm_75"],
        "cubin_architecture": 90,
        "matrix_instructions": ["mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"],
    }


@pytest.mark.parametrize(("capability", "limit"), [("7.5", 65536), ("7.0", 98304)])
def test_a_launch_over_the_old_cards_limit_fails_with_both_numbers(
    capability: str, limit: int, compiled: Callable[[str], dict[str, Any]]
) -> None:
    # The real card's limit is 232448 B.
    refused = compiled(capability)["refused"]
    assert refused["fits"] == 65536
    assert "Required: 131072" in refused["error"]
    assert f"Hardware limit: {limit}" in refused["error"]


def test_the_smaller_of_two_limits_counts_for_each_device() -> None:
    cards = emulated_devices([(7, 5), (7, 0)], 2)
    asked = SimpleNamespace(
        get_device_properties=lambda index: {"max_shared_mem": 81920, "x": index}
    )
    driver = SimpleNamespace(utils=asked)
    emulation.limit_shared_memory(driver, cards)
    assert driver.utils.get_device_properties(0) == {"max_shared_mem": 65536, "x": 0}
    assert driver.utils.get_device_properties(1) == {"max_shared_mem": 81920, "x": 1}


@pytest.fixture
def torch_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch as on a Hopper card; what emulation replaces is put back afterwards."""
    from torch._dynamo.device_interface import CudaInterface

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: HOPPER.name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(
        CudaInterface, "get_compute_capability", CudaInterface.get_compute_capability
    )


@pytest.mark.usefixtures("torch_answers")
def test_torch_answers_as_the_old_card_but_inductor_learns_the_chip() -> None:
    from torch._dynamo.device_interface import CudaInterface

    emulation._answer_for_torch(TURING)
    assert torch.cuda.get_device_capability() == (7, 5)
    assert torch.cuda.get_device_name(0) == "Tesla T4"
    assert not torch.cuda.is_bf16_supported(including_emulation=False)
    assert CudaInterface.get_compute_capability("cuda:0") == 90


@pytest.mark.usefixtures("torch_answers")
def test_a_mixed_box_answers_for_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.cuda._utils,
        "_get_device_index",
        lambda device, optional: 1 if device is None else device,
    )
    emulation._answer_for_torch(emulated_devices([(7, 5), (7, 0)], 2))
    assert [torch.cuda.get_device_capability(index) for index in (0, 1)] == [(7, 5), (7, 0)]
    assert torch.cuda.get_device_name() == "Tesla V100-SXM2-32GB"


def test_caches_are_kept_apart_once_for_a_process_and_those_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = (
        environment.TRITON_CACHE_DIR,
        environment.TORCHINDUCTOR_CACHE_DIR,
        environment.VLLM_CACHE_ROOT,
    )
    for variable in variables:
        monkeypatch.setenv(variable.name, str(tmp_path / variable.name))
    emulation._keep_caches_apart(TURING)
    once = [variable.get() for variable in variables]
    assert once == [str(tmp_path / variable.name / "emulated-sm75") for variable in variables]
    emulation._keep_caches_apart(TURING)
    assert [variable.get() for variable in variables] == once


def test_caches_without_a_setting_go_below_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what is set below
        monkeypatch.delenv(name)
    emulation._keep_caches_apart(VOLTA)
    assert all(Path(os.environ[name]).name == "emulated-sm70" for name in names)


def test_an_older_card_cannot_stand_for_a_newer_one() -> None:
    volta = Device(index=0, name="Tesla V100-SXM2-32GB", capability=(7, 0))
    with pytest.raises(RuntimeError, match=r"EMULATE=7.5 needs a newer card: device 0 .* is sm70"):
        emulation._check(TURING, [volta])
    emulation._check(TURING, [HOPPER])


def test_without_a_card_there_is_nothing_to_emulate_on() -> None:
    with pytest.raises(RuntimeError, match="none is visible"):
        emulation._check(TURING, [])


def test_the_banner_names_both_cards_and_what_cannot_be_concluded() -> None:
    said = emulation.banner(TURING, [HOPPER, HOPPER])
    assert "EMULATION, NOT A TESLA T4: NVIDIA H200 (sm90) answers" in said
    assert "Tesla T4 (sm75, 65536 B of shared memory a block)" in said
    assert "It cannot show: speed" in said
