# SPDX-License-Identifier: Apache-2.0
"""The cards of the box, as CUDA numbers them, and how they reach each other."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device, emulated_devices, nvml_devices, visible_devices


@dataclass(frozen=True)
class Link:
    """How two cards reach each other.

    Attributes:
        first, second: CUDA's numbers.
        peer_access: whether the driver reports that one can read the other's memory.
        nvlink: whether they are joined by NVLink.
    """

    first: int
    second: int
    peer_access: bool
    nvlink: bool


@dataclass(frozen=True)
class Box:
    """What the doctor looks at.

    Attributes:
        cards: those that CUDA shows, or the emulated ones, in CUDA's order.
        hidden: how many the box has beside `cards`.
        links: between each pair of `cards`; empty for emulated ones.
        driver: its version and the newest CUDA it runs; None without a driver.
        emulated: the cards are not there.
        problem: why the cards could not be put in CUDA's order; None where they could.
    """

    cards: tuple[Device, ...]
    hidden: int
    links: tuple[Link, ...]
    driver: str | None
    emulated: bool
    problem: str | None = None


def look() -> Box:
    """Look at the box.

    Raises:
        environment.EnvironmentVariableError: `VLLM_PRE_AMPERE_EMULATE` names no cards.
    """
    emulate = environment.EMULATE.get()
    if emulate is not None:
        cards = emulated_devices(emulate, len(emulate))
        return Box(cards, len(nvml_devices()), (), _driver(), emulated=True)
    everything = nvml_devices()
    try:
        visible = visible_devices(
            environment.CUDA_DEVICE_ORDER.get(), environment.CUDA_VISIBLE_DEVICES.get()
        )
    except RuntimeError as error:
        return Box(everything, 0, _links(everything), _driver(), False, str(error))
    hidden = len(everything) - len(visible)
    return Box(visible, hidden, _links(visible), _driver(), emulated=False)


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        version = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return f"{version}, runs CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"


def _links(cards: Sequence[Device]) -> tuple[Link, ...]:
    if len(cards) < 2:
        return ()
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = {card.index: pynvml.nvmlDeviceGetHandleByUUID(card.uuid) for card in cards}

        def reach(first: int, second: int, capability: int) -> bool:
            status = pynvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], capability)
            return bool(status == pynvml.NVML_P2P_STATUS_OK)

        return tuple(
            Link(
                a.index,
                b.index,
                reach(a.index, b.index, pynvml.NVML_P2P_CAPS_INDEX_READ),
                reach(a.index, b.index, pynvml.NVML_P2P_CAPS_INDEX_NVLINK),
            )
            for a, b in combinations(cards, 2)
        )
    finally:
        pynvml.nvmlShutdown()


def without_identity(text: str, secrets: Sequence[str]) -> str:
    """A text that can go into a public report.

    Args:
        text: may hold host names, user names, paths, card UUIDs and access tokens.
        secrets: words that are replaced wherever they stand, such as the host's and user's name.
    """
    for secret in sorted((s for s in secrets if len(s) > 1), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", "…", text, flags=re.IGNORECASE)
    for pattern in (_TOKEN, _PATH, _UUID, _ADDRESS):
        text = pattern.sub("…", text)
    return text


_TOKEN = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[bp]-)[\w-]{8,}")
_PATH = re.compile(
    r"(?<![\w.])(?:~|\.{0,2})/[\w.@+~-]+(?:/[\w.@+~-]+)*/?|\b[A-Za-z]:\\[^\s\"'(),;]+"
)
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]{7,}")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?")
