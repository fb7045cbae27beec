# SPDX-License-Identifier: Apache-2.0
"""Start a compiling process for each card and lowering, and hold their tables against the recorded.

docs/preflight.md says what a table holds and when the recorded one is to be updated.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm.pre_ampere.devices import Capability
from vllm.pre_ampere.preflight.compile_for_card import Request
from vllm.pre_ampere.preflight.model import ModelShapes
from vllm.pre_ampere.preflight.report import Lowering, Results, Table, differences

RECORDED = Path(__file__).with_name("results") / "kernels.json"
# Name and tensor-parallel size; benchmarks/triton_turing.py times this model's GDN heads.
MEASURED = ("Qwen3.5-4B", 1)
UPDATE_COMMAND = "vllm-pre-ampere preflight --all --update"

_LOWERINGS = {
    (7, 5): (Lowering.TENSOR_CORES, Lowering.TRITON),
    (7, 2): (Lowering.TRITON,),
    (7, 0): (Lowering.TRITON,),
}


class PreflightError(RuntimeError):
    """The compiling process failed; the message holds the end of what it said."""


@dataclass(frozen=True)
class Plan:
    """What `preflight` compiles.

    Attributes:
        capabilities: of the cards.
        models: each on every card.
        complete: every configuration that autotuning would try, not only what is launched.
        only: beginnings of the names of the launches; empty for all.
    """

    capabilities: tuple[Capability, ...]
    models: tuple[ModelShapes, ...]
    complete: bool = False
    only: tuple[str, ...] = ()

    def completed(self) -> "Plan":
        """The plan for every configuration, of one model.

        Head counts reach the tuned kernels as strides and leave their tiles and registers alone, so
        one model stands for all: the one for whose heads the launch configurations were measured,
        where it is among the models, else the first.
        """
        measured = (m for m in self.models if (m.name, m.tensor_parallel_size) == MEASURED)
        return replace(self, models=(next(measured, self.models[0]),), complete=True)

    def requests(self, folder: Path) -> tuple[Request, ...]:
        """One for each process; they share compiled kernels in `folder`."""
        return tuple(
            Request(
                capability=capability,
                lowering=lowering,
                models=self.models,
                complete=self.complete,
                cache=folder / "cache",
                only=self.only,
            )
            for capability in self.capabilities
            for lowering in _LOWERINGS[capability]
        )


def preflight(plan: Plan, on_start: Callable[[Request], None] = lambda request: None) -> Results:
    """Compile everything in the plan, one process after the other.

    Args:
        plan: see there.
        on_start: told each request before its process starts.

    Raises:
        PreflightError: a process failed.
    """
    tables: list[Table] = []
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        for number, request in enumerate(plan.requests(Path(folder))):
            on_start(request)
            tables += _run(request, Path(folder), number).tables
    return Results(tables=tuple(tables))


def recorded() -> Results:
    """The tables that come with the project."""
    return Results.model_validate_json(RECORDED.read_text())


def record(results: Results) -> None:
    """Put the tables in the place of the recorded ones of the same names."""
    old = recorded() if RECORDED.exists() else Results(tables=())
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(old.updated(results.tables).model_dump_json(indent=1) + "\n")


def changes(found: Results, only: Sequence[str] = ()) -> list[str]:
    """How the tables differ from the recorded ones, a sentence each.

    Args:
        found: whole tables, or, with `only`, tables of these launches.
        only: beginnings of names of launches.
    """
    reference = recorded()
    said = []
    for table in found.tables:
        old = reference.table(table.name)
        if old is None:
            said.append(f"{table.title}: nothing is recorded")
            continue
        if old.triton != table.triton:
            said.append(f"{table.title}: recorded with Triton {old.triton}, this is {table.triton}")
        kept = tuple(f for f in old.findings if not only or f.launch.startswith(tuple(only)))
        old = old.model_copy(update={"findings": kept})
        said += [f"{table.title}: {difference}" for difference in differences(old, table)]
    return said


def _run(request: Request, folder: Path, number: int) -> Results:
    asked, answered = folder / f"request-{number}.json", folder / f"tables-{number}.json"
    asked.write_text(request.model_dump_json())
    process = subprocess.run(
        [sys.executable, "-m", "vllm.pre_ampere.preflight.compile_for_card", asked, answered],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        end = "\n".join(process.stdout.splitlines()[-25:])
        raise PreflightError(
            f"compiling for sm{request.capability[0]}{request.capability[1]} ended with status "
            f"{process.returncode}:\n{end}"
        )
    return Results.model_validate_json(answered.read_text())
