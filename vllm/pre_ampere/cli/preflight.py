# SPDX-License-Identifier: Apache-2.0
"""`vllm-pre-ampere preflight`: what would not launch on a Volta or Turing card?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from vllm.pre_ampere.cli import UserError, output_file

if TYPE_CHECKING:
    from vllm.pre_ampere.devices import Capability
    from vllm.pre_ampere.preflight.model import ModelShapes
    from vllm.pre_ampere.preflight.report import Finding, Results, Table

_OVER, _SCALAR, _SPILLED = "bold red", "yellow", "yellow"


def command(
    arch: Annotated[str, typer.Option(help="Architectures, separated by commas.")] = "sm75,sm70",
    model: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help="A model's config.json; the known models if left out."
        ),
    ] = None,
    tensor_parallel: Annotated[
        str, typer.Option("--tp", help="Tensor-parallel sizes, separated by commas.")
    ] = "1,2",
    every_configuration: Annotated[
        bool,
        typer.Option(
            "--all", help="Also every configuration that autotuning would try, of one model. Slow."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option(help="Compare with the recorded tables; end 1 where they differ.")
    ] = False,
    update: Annotated[bool, typer.Option(help="Record the tables.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the tables to this file.")
    ] = None,
) -> None:
    """Compile every kernel that a model launches, for cards that need not be there.

    Each is compiled by its real launcher for the model's shapes. Ends 1 where one needs more shared
    memory than a block of the card has, or does not compile.
    """
    from vllm.pre_ampere.preflight import run
    from vllm.pre_ampere.preflight.report import Results

    output_file.check("--json", json_path)
    console = Console()
    plan = run.Plan(_capabilities(arch), _models(model or [], tensor_parallel))
    plans = [plan]
    if every_configuration:
        plans.append(plan.completed())
    tables: list[Table] = []
    for part in plans:
        with console.status("starting") as status:
            found = run.preflight(
                part,
                lambda request: status.update(
                    f"compiling for sm{request.capability[0]}{request.capability[1]}, "
                    f"{request.lowering} lowering"
                ),
            )
        for table in found.tables:
            console.print(_rendered(table))
        tables += found.tables
    results = Results(tables=tuple(tables))
    if json_path is not None:
        json_path.write_text(json.dumps(results.model_dump(mode="json"), indent=1) + "\n")
    if update:
        run.record(results)
    unlaunchable = [(table, f) for table in tables for f in table.unlaunchable]
    for table, finding in unlaunchable:
        console.print(Text(f"{table.title}: {_complaint(finding)}", style=_OVER))
    changed = _changes(results) if check else []
    for change in changed:
        console.print(change)
    if changed:
        console.print(f"Record what is found now with: {run.UPDATE_COMMAND}")
    if unlaunchable or changed:
        raise typer.Exit(1)


def _capabilities(arch: str) -> "tuple[Capability, ...]":
    from vllm.pre_ampere.devices import PRE_AMPERE

    known = {f"sm{major}{minor}": (major, minor) for major, minor in PRE_AMPERE}
    names = [name.strip() for name in arch.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--arch {arch}: {unknown[0]} is none of {', '.join(known)}")
    return tuple(known[name] for name in names)


def _models(paths: list[Path], tensor_parallel: str) -> "tuple[ModelShapes, ...]":
    from pydantic import ValidationError

    from vllm.pre_ampere.preflight.model import known_models, load_shapes

    sizes = [size.strip() for size in tensor_parallel.split(",")]
    wrong = next((size for size in sizes if not size.isdecimal() or int(size) == 0), None)
    if wrong is not None:
        raise UserError(f"--tp {tensor_parallel}: {wrong!r} is no number of cards")
    try:
        return tuple(
            load_shapes(path, int(size)) for path in paths or known_models() for size in sizes
        )
    except ValidationError as error:
        missing = ", ".join(str(part["loc"][0]) for part in error.errors())
        raise UserError(
            f"--model: not a Qwen3-Next or Qwen3.5 model, for want of {missing}"
        ) from error
    except (ValueError, OSError) as error:
        raise UserError(f"--model: {error}") from error


def _changes(results: "Results") -> list[str]:
    from vllm.pre_ampere.preflight import run

    return run.changes(results)


def _complaint(finding: "Finding") -> str:
    if finding.failure is not None:
        return f"{finding.kernel} of {finding.launch} does not compile: {finding.failure}"
    return (
        f"{finding.kernel} ({finding.configuration}) of {finding.launch} needs "
        f"{finding.shared_memory} B of shared memory a block; the card has "
        f"{finding.shared_memory_limit} B"
    )


def _rendered(table: "Table") -> RichTable:
    limits = sorted({finding.shared_memory_limit for finding in table.findings})
    may_have = " or ".join(f"{limit} B" for limit in limits)
    rendered = RichTable(
        title=table.title,
        caption=f"a block of the card may have {may_have} of shared memory",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    rendered.add_column("launch and its kernels", overflow="fold")
    for heading in ("shared B", "registers", "stack B", "products", "seconds"):
        rendered.add_column(heading, justify="right", no_wrap=True)
    launch = None
    for finding in table.findings:
        if finding.launch != launch:
            launch = finding.launch
            rendered.add_row(Text(launch, style="bold"))
        rendered.add_row(
            f"  {finding.kernel}, {finding.configuration}",
            Text(str(finding.shared_memory), style=_OVER if finding.over_the_limit else ""),
            str(finding.registers),
            Text(str(finding.stack), style=_SPILLED if finding.stack else ""),
            _products(finding),
            f"{finding.compile_seconds:.1f}",
        )
    return rendered


def _products(finding: "Finding") -> Text:
    if finding.failure is not None:
        return Text("fails", style=_OVER)
    if not finding.products:
        return Text("none")
    if finding.scalar_product:
        return Text(f"{finding.fma_instructions} FMA only", style=_SCALAR)
    beside = f" + {finding.fma_instructions} FMA" if finding.fma_instructions else ""
    return Text(f"{finding.tensor_core_instructions} mma{beside}")
