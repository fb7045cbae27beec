# SPDX-License-Identifier: Apache-2.0
"""`vllm-pre-ampere doctor`: would this box serve, with what, and why?"""

import getpass
import io
import json
import socket
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm.pre_ampere.cli import UserError, output_file
from vllm.pre_ampere.cli.checkpoint import read_checkpoint
from vllm.pre_ampere.cli.diagnosis import box, probe, screen, serving, software
from vllm.pre_ampere.cli.diagnosis.diagnosis import Diagnosis, as_json

_REPORT_WIDTH = 140


def command(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a checkpoint: say how it would be served.")
    ] = None,
    run_probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Load the model, run one prompt, and compare each layer's largest activation with "
            "float16's largest number, 65504.",
        ),
    ] = False,
    print_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write the screen to this file, too, without host names, user names, paths or "
            "tokens: it can be attached to a public report."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ENGINE OPTIONS", help="After --: options as `vllm serve` takes them."
        ),
    ] = None,
) -> None:
    """Look at the box's cards and software and, with a model, at every choice made to serve it.

    Without --model nothing of the engine is loaded. With it the configuration is made as for
    `vllm serve`; the weights must be there, but none are loaded unless --probe is given.

    Exit status: 0 where it would serve, 1 where it would not, 2 where it could not be asked.

    Example: VLLM_PRE_AMPERE_EMULATE=7.5 vllm-pre-ampere doctor --model ./Qwen3.5-4B
    """
    if (run_probe or engine) and model is None:
        raise UserError("--probe and engine options need a --model")
    output_file.check("--report", report)
    checkpoint = None if model is None else read_checkpoint(model)
    diagnosis = Diagnosis(box.look(), software.python_version(), software.installed())
    options = engine or []
    if checkpoint is not None and diagnosis.first_change is None:
        found = serving.look(checkpoint, options)
        activations = (
            probe.look(checkpoint, options) if run_probe and found.refusal is None else None
        )
        diagnosis = Diagnosis(
            diagnosis.box, diagnosis.python, diagnosis.packages, found, activations
        )
    if report is not None:
        report.write_text(as_report(diagnosis))
    if print_json:
        print(json.dumps(as_json(diagnosis), indent=2, default=str))
    else:
        console = Console()
        for part in screen.render(diagnosis):
            console.print(part)
            console.print()
    raise typer.Exit(0 if diagnosis.first_change is None else 1)


def as_report(diagnosis: Diagnosis) -> str:
    """The screen as text that says nothing of who runs it where."""
    page = io.StringIO()
    console = Console(file=page, width=_REPORT_WIDTH, no_color=True)
    for part in screen.render(diagnosis):
        console.print(part)
        console.print()
    lines = (line.rstrip() for line in page.getvalue().splitlines())
    return box.without_identity("\n".join(lines) + "\n", [socket.gethostname(), getpass.getuser()])
