# SPDX-License-Identifier: Apache-2.0
"""Everything the doctor found, and the first thing to change."""

from dataclasses import dataclass
from typing import Any

from vllm.pre_ampere.cli.diagnosis.box import Box
from vllm.pre_ampere.cli.diagnosis.probe import Probe
from vllm.pre_ampere.cli.diagnosis.serving import Serving
from vllm.pre_ampere.cli.diagnosis.software import Package, obstacle
from vllm.pre_ampere.devices import Device, any_pre_ampere
from vllm.pre_ampere.proof import CLAIMS


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        box: the cards.
        python: the interpreter's version.
        packages: the installed libraries.
        serving: how the model would be served; None where none was given.
        probe: the model's activations; None where it was not asked for.
    """

    box: Box
    python: str
    packages: tuple[Package, ...]
    serving: Serving | None = None
    probe: Probe | None = None

    @property
    def first_change(self) -> str | None:
        """The first thing that keeps the box, or the model, from serving; None where nothing does."""
        if self.box.problem is not None:
            return self.box.problem
        if not self.box.cards:
            if self.box.hidden:
                return "CUDA_VISIBLE_DEVICES shows no card: set it to the cards to use, or unset it"
            return (
                "the box has no NVIDIA GPU: set VLLM_PRE_AMPERE_EMULATE=7.5 to look at it, and to "
                "serve on its CPU, as a box with a Turing card"
            )
        if not self.box.emulated and (found := obstacle(self.packages, self.box.cards)):
            return found
        if self.serving is not None and self.serving.refusal is not None:
            return self.serving.refusal
        if self.probe is not None and self.probe.first_overflow is not None:
            return (
                f"the model overflows float16 in {self.probe.first_overflow}: serve it in "
                "--dtype float32, or use a checkpoint made for float16"
            )
        return None

    @property
    def note(self) -> str | None:
        """What a reader should know although nothing has to be changed."""
        if self.box.emulated:
            return (
                "These cards are emulated: nothing here was asked of a card. On a CPU, attention and "
                "graphs are those of the CPU; what is passed over is what the card would not run."
            )
        if self.box.cards and not any_pre_ampere(self.box.cards):
            return "No card here is Volta or Turing: this project stays out of the way."
        return None


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same for programs. Holds no host name, user name, path or UUID."""
    box, serving, probe = diagnosis.box, diagnosis.serving, diagnosis.probe
    return {
        "serves": diagnosis.first_change is None,
        "first_change": diagnosis.first_change,
        "note": diagnosis.note,
        "emulated": box.emulated,
        "driver": box.driver,
        "cards": [_card(card) for card in box.cards],
        "hidden_cards": box.hidden,
        "links": [vars(link) for link in box.links],
        "python": diagnosis.python,
        "packages": [
            {
                "name": package.name,
                "version": package.version,
                "code": None if package.code is None else str(package.code),
                "note": package.note,
                "runs_on": {
                    card.architecture: package.runs_on(card.capability) for card in box.cards
                },
            }
            for package in diagnosis.packages
        ],
        "serving": None if serving is None else _serving(serving),
        "probe": None if probe is None else probe.as_json(),
        "proof": [
            {"claim": claim.statement, "level": int(claim.level), "shown_by": claim.shown_by}
            for claim in CLAIMS
        ],
    }


def _card(card: Device) -> dict[str, Any]:
    return {
        "index": card.index,
        "name": card.name,
        "capability": f"{card.capability[0]}.{card.capability[1]}",
        "memory_bytes": card.total_memory,
        "shared_memory_per_block_bytes": card.shared_memory_per_block,
        "tensor_cores": card.has_tensor_cores,
        "bfloat16": card.supports_bfloat16,
    }


def _serving(serving: Serving) -> dict[str, Any]:
    record = serving.baseline
    return {
        "model": serving.model,
        "refusal": serving.refusal,
        "choices": [
            {**vars(choice), "passed_over": [list(pair) for pair in choice.passed_over]}
            for choice in serving.choices
        ],
        "baseline": None
        if record is None
        else {
            "active": record.active,
            "reason": record.reason,
            "variables": [vars(entry) for entry in record.variables],
            "policy": [vars(entry) for entry in record.policy],
        },
        "guards": [vars(action) for action in serving.guards],
    }
