# SPDX-License-Identifier: Apache-2.0
"""devices.py: what NVML and the driver say, in; what the project believes of the cards, out."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere import devices
from vllm.pre_ampere.devices import Device


def card(index: int, capability: tuple[int, int] = (7, 5), name: str = "Quadro RTX 8000") -> Device:
    return Device(
        index=index,
        name=name,
        capability=capability,
        uuid=f"GPU-{index:08x}-0000-0000-0000-000000000000",
        pci_bus_id=f"00000000:{index + 1:02x}:00.0",
    )


TURING, VOLTA, AMPERE = (7, 5), (7, 0), (8, 0)


@pytest.mark.parametrize(
    ("capability", "architecture", "volta", "turing", "shared_memory"),
    [
        ((7, 0), "sm70", True, False, 98304),
        ((7, 2), "sm72", True, False, 98304),
        ((7, 5), "sm75", False, True, 65536),
        ((8, 0), "sm80", False, False, 166912),
        ((9, 0), "sm90", False, False, 232448),
        ((6, 1), "sm61", False, False, 49152),
    ],
)
def test_facts_of_an_architecture(
    capability: tuple[int, int], architecture: str, volta: bool, turing: bool, shared_memory: int
) -> None:
    device = card(0, capability)
    assert device.architecture == architecture
    assert (device.is_volta, device.is_turing) == (volta, turing)
    assert device.is_pre_ampere == (volta or turing)
    assert device.shared_memory_per_block == shared_memory
    assert device.supports_bfloat16 == (capability >= (8, 0))


@pytest.mark.parametrize(
    ("name", "tensor_cores"),
    [
        ("NVIDIA GeForce GTX 1650", False),
        ("NVIDIA GeForce GTX 1660 Ti", False),
        ("GeForce GTX 1660 SUPER", False),
        ("NVIDIA GeForce MX450", False),
        ("NVIDIA T1000 8GB", False),
        ("NVIDIA T400 4GB", False),
        ("Quadro T2000", False),
        ("NVIDIA CMP 30HX", False),
        ("Tesla T4", True),
        ("NVIDIA T4G", True),
        ("Quadro RTX 8000", True),
        ("NVIDIA GeForce RTX 2080 Ti", True),
        ("NVIDIA TITAN RTX", True),
        ("NVIDIA GeForce RTX 2060", True),
    ],
)
def test_turing_without_tensor_cores_is_told_by_its_name(name: str, tensor_cores: bool) -> None:
    assert card(0, TURING, name).has_tensor_cores is tensor_cores


def test_volta_has_tensor_cores_and_pascal_has_none() -> None:
    assert card(0, VOLTA, "Tesla V100-PCIE-16GB").has_tensor_cores
    assert not card(0, (6, 1), "Tesla P40").has_tensor_cores


def test_fastest_first_is_the_drivers_word_not_nvmls() -> None:
    boxed = [card(0, TURING), card(1, VOLTA), card(2, AMPERE)]
    fastest = [boxed[2].uuid, boxed[0].uuid, boxed[1].uuid]
    ordered = devices.order_as_cuda(boxed, None, lambda: fastest)
    assert [device.capability for device in ordered] == [AMPERE, TURING, VOLTA]


def test_pci_order_does_not_ask_the_driver() -> None:
    def never() -> Sequence[str]:
        raise AssertionError("the driver was asked")

    boxed = [card(2, AMPERE), card(0, TURING), card(1, VOLTA)]
    ordered = devices.order_as_cuda(boxed, "PCI_BUS_ID", never)
    assert [device.index for device in ordered] == [0, 1, 2]
    alike = [card(1), card(0)]
    assert [device.index for device in devices.order_as_cuda(alike, None, never)] == [0, 1]


def test_a_driver_that_does_not_know_a_card_is_an_error_with_the_remedy() -> None:
    boxed = [card(0, TURING), card(1, VOLTA)]
    with pytest.raises(RuntimeError, match=r"lists 1 cards and NVML 2.*CUDA_DEVICE_ORDER"):
        devices.order_as_cuda(boxed, None, lambda: [boxed[0].uuid])


BOX = [card(0, TURING), card(1, VOLTA), card(2, AMPERE)]


@pytest.mark.parametrize(
    ("visible", "capabilities"),
    [
        (None, [TURING, VOLTA, AMPERE]),
        ("", []),
        ("1", [VOLTA]),
        ("2,0", [AMPERE, TURING]),
        (" 2 , 0 ", [AMPERE, TURING]),
        ("0,0", []),
        ("0,-1,1", [TURING]),
        ("0,9,1", [TURING]),
        ("9", []),
        ("GPU-00000001", [VOLTA]),
        ("GPU-00000002-0000-0000-0000-000000000000,GPU-00000000", [AMPERE, TURING]),
        ("GPU-0000000", []),
        ("GPU-00000001,1", []),
        ("NoDevFiles", []),
        ("0,word,1", [TURING]),
    ],
)
def test_cuda_visible_devices(visible: str | None, capabilities: list[tuple[int, int]]) -> None:
    seen = devices.apply_visibility(BOX, visible)
    assert [device.capability for device in seen] == capabilities
    assert [device.index for device in seen] == list(range(len(seen)))


def test_a_mig_slice_is_found_by_its_uuid() -> None:
    mig = Device(3, "NVIDIA A100 MIG 1g.5gb", AMPERE, uuid="MIG-77777777-1111")
    assert devices.apply_visibility([*BOX, mig], "MIG-7777")[0].name == mig.name


@given(st.permutations(range(6)), st.integers(0, 6))
def test_visibility_is_a_selection_in_the_order_given(order: list[int], count: int) -> None:
    box = [card(index) for index in range(6)]
    chosen = order[:count]
    seen = devices.apply_visibility(box, ",".join(map(str, chosen)))
    assert [device.uuid for device in seen] == [box[index].uuid for index in chosen]


def test_only_as_many_cards_take_part_as_there_are_ranks() -> None:
    assert [d.capability for d in devices.participating_devices(BOX, 2)] == [TURING, VOLTA]


def test_emulated_cards_one_for_all_or_one_each() -> None:
    assert [d.name for d in devices.emulated_devices([TURING], 2)] == ["Tesla T4", "Tesla T4"]
    mixed = devices.emulated_devices([TURING, VOLTA], 2)
    assert [(d.index, d.capability, d.emulated) for d in mixed] == [
        (0, TURING, True),
        (1, VOLTA, True),
    ]
    with pytest.raises(ValueError, match=r"VLLM_PRE_AMPERE_EMULATE names 3 cards.*2 ranks"):
        devices.emulated_devices([TURING, VOLTA, VOLTA], 2)
