# SPDX-License-Identifier: Apache-2.0
"""The doctor's screen."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm.pre_ampere.baseline import BaselineRecord
from vllm.pre_ampere.cli.diagnosis.box import Box
from vllm.pre_ampere.cli.diagnosis.diagnosis import Diagnosis
from vllm.pre_ampere.cli.diagnosis.probe import FLOAT16_LARGEST, Probe
from vllm.pre_ampere.cli.diagnosis.serving import Serving
from vllm.pre_ampere.cli.diagnosis.software import Package
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.proof import CLAIMS, Level

_GIB = 1024**3


def render(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """The parts of the screen, from top to bottom."""
    yield from _box(diagnosis.box)
    yield _software(diagnosis.packages, diagnosis.box.cards, diagnosis.python)
    if diagnosis.serving is not None and diagnosis.serving.choices:
        yield from _serving(diagnosis.serving)
    if diagnosis.probe is not None:
        yield _probe(diagnosis.probe)
    yield _proof()
    if diagnosis.note is not None:
        yield Text(diagnosis.note, style="yellow")
    change = diagnosis.first_change
    if change is not None:
        yield Text.assemble(("Would not serve. ", "bold red"), f"First change: {change}")
    elif diagnosis.serving is not None:
        yield Text(f"Would serve {diagnosis.serving.model}.", style="bold green")
    else:
        yield Text("Would serve. Pass --model to see how.", style="bold green")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=None)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def _box(box: Box) -> Iterator[RenderableType]:
    table = _table(
        f"Cards ({'emulated' if box.emulated else 'in the order in which CUDA numbers them'})",
        *("", "name", "capability", "memory", "shared memory a block", "tensor cores", "bfloat16"),
    )
    for card in box.cards:
        memory = f"{card.total_memory / _GIB:.1f} GiB" if card.total_memory else "-"
        table.add_row(
            str(card.index),
            escape(card.name),
            f"{card.capability[0]}.{card.capability[1]}",
            memory,
            f"{card.shared_memory_per_block} B",
            "yes" if card.has_tensor_cores else "no",
            "yes" if card.supports_bfloat16 else "no",
        )
    yield table if box.cards else Text("No cards.", style="bold")
    if box.hidden and box.emulated:
        yield Text(f"NVIDIA cards that the box has: {box.hidden}.")
    elif box.hidden:
        yield Text(f"{box.hidden} more hidden by CUDA_VISIBLE_DEVICES.")
    for link in box.links:
        peer = "peer access" if link.peer_access else "no peer access"
        nvlink = ", NVLink" if link.nvlink else ", no NVLink"
        yield Text(f"{link.first} and {link.second}: {peer}{nvlink}")
    yield Text(f"Driver: {box.driver or 'none'}")


def _software(packages: tuple[Package, ...], cards: tuple[Device, ...], python: str) -> Table:
    table = _table(f"Software (Python {python})", "library", "version", "GPU code", "runs on")
    kinds = {card.architecture: card.capability for card in cards}
    for package in packages:
        runs = [
            f"[green]{name}[/]" if package.runs_on(capability) else f"[red]not {name}[/]"
            for name, capability in kinds.items()
            if package.code is not None
        ]
        code = package.note if package.code is None else str(package.code)
        table.add_row(package.name, package.version or "-", escape(code), " ".join(runs))
    return table


def _serving(serving: Serving) -> Iterator[RenderableType]:
    table = _table(f"Serving {escape(serving.model)}", "what", "chosen", "why")
    for choice in serving.choices:
        table.add_row(choice.subject, f"[bold]{escape(choice.chosen)}[/]", escape(choice.reason))
        for name, reason in choice.passed_over:
            table.add_row("", f"[dim]not {escape(name)}[/]", f"[dim]{escape(reason)}[/]")
    yield table
    if serving.baseline is not None:
        yield _baseline(serving.baseline)
    guards = _table("Guards", "guard", "does", "why")
    for action in serving.guards:
        guards.add_row(action.guard, escape(action.did), escape(action.reason))
    if serving.guards:
        yield guards


def _baseline(record: BaselineRecord) -> Table:
    state = "active" if record.active else "not active"
    table = _table(f"Baseline ({state}: {escape(record.reason)})", "setting", "value", "", "why")
    for entry in (*record.variables, *record.policy):
        table.add_row(entry.name, escape(entry.value), entry.decision.value, escape(entry.reason))
    return table


def _probe(probe: Probe) -> Table:
    table = _table(
        f"Largest activations of one prompt (float16 ends at {FLOAT16_LARGEST:.0f})",
        *("layer", "largest", "of the range", "where", ""),
    )
    for layer in probe.layers:
        style = "" if layer.finite and layer.share < 0.5 else "yellow" if layer.finite else "red"
        table.add_row(
            escape(layer.layer),
            f"{layer.largest:.4g}",
            f"{layer.share:.2%}",
            escape(layer.module),
            "" if layer.finite else "inf or NaN",
            style=style,
        )
    if probe.first_overflow is not None:
        table.caption = f"The first module with inf or NaN is {escape(probe.first_overflow)}."
    if probe.nan_logits:
        table.caption = f"{table.caption or ''} The request failed: its logits are NaN."
    return table


def _proof() -> Table:
    table = _table("How far it is proven", "level", "claim")
    for claim in CLAIMS:
        table.add_row(str(int(claim.level)), escape(claim.statement))
    table.caption = "; ".join(f"{int(level)} {level.meaning}" for level in Level)
    table.caption_justify = "left"
    return table
