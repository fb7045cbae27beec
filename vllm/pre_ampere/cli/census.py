# SPDX-License-Identifier: Apache-2.0
"""`vllm-pre-ampere census`: what does a step launch on the GPU?"""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm.pre_ampere.census import Census, KernelClass, own_triton_kernels, read_trace
from vllm.pre_ampere.cli import UserError, output_file
from vllm.pre_ampere.cli.checkpoint import read_checkpoint
from vllm.pre_ampere.cli.generation import Job, generate

if TYPE_CHECKING:
    from collections.abc import Mapping

# Steps before the counted ones: the prefill, and those in which the engine comes to its pace.
_UNTRACED_STEPS = 12
_KERNELS_SHOWN = 20
# Characters of a C++ name, whose template arguments can fill a screen.
_NAME_SHOWN = 80


def command(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    k: Annotated[
        int, typer.Option("-k", min=0, max=15, help="Draft tokens that are verified at once.")
    ] = 0,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to count.")] = 32,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the census to this file, too.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="A census that --json wrote, to show beside this one.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw the launches by class to this PNG file.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ENGINE OPTIONS",
            help="After --: options for the engine, as `vllm serve` takes them.",
        ),
    ] = None,
) -> None:
    """Count what decode (k=0) or verification steps launch on the GPU, by class.

    One request generates; upstream's profiler records its steps, CUDA graphs included. Times hold
    the profiler's own cost, so compare them, and rest on the counts.

    Exit status: 0, or 2 where it could not be run.

    Example: vllm-pre-ampere census --model ./Qwen3.5-4B -k 3 --json k3.json --compare k0.json
    """
    output_file.check("--json", json_file)
    output_file.check("--chart", chart)
    checkpoint = read_checkpoint(model)
    if k and not checkpoint.has_mtp:
        raise UserError(f"-k {k}: the checkpoint {model} has no MTP layers to draft with")
    other = None if compare is None else read_record(compare)
    if chart is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError('--chart needs matplotlib: pip install ".[charts]"')
    _require_gpu()
    label = f"{checkpoint.name}, k={k}"
    console = Console(stderr=True)
    with console.status(f"{label}: starting the engine") as status:
        census, device = _count(
            model,
            k,
            context,
            steps,
            tuple(engine or ()),
            lambda: status.update(f"{label}: running"),
        )
    title = f"{label}, after {context} tokens, {device}"
    runs = {title: census}
    if other is not None:
        # Two runs of the same settings are two runs still.
        runs[other[0] if other[0] != title else f"{title} ({compare})"] = other[1]
    Console().print(class_table(runs))
    Console().print(kernel_table(census, title))
    if json_file is not None:
        record = {"title": title, "census": census.to_json()}
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if chart is not None:
        draw(runs, chart)


def read_record(path: Path) -> tuple[str, Census]:
    """Title and census of a file that `--json` wrote.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    try:
        record = json.loads(path.read_text())
        return str(record["title"]), Census.from_json(record["census"])
    except OSError as error:
        raise UserError(f"--compare {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--compare {path}: not written by census --json ({error!r})") from None


def class_table(runs: "Mapping[str, Census]") -> Table:
    """Launches and microseconds a step by class, and launches in a GDN layer; one line a run."""
    table = Table(title="a step, by class", title_justify="left")
    table.add_column("class", no_wrap=True)
    if len(runs) > 1:
        table.add_column("run", overflow="fold")
    for heading in ("launches", "µs", "in a GDN layer"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(kind: str, figures: "Mapping[str, tuple[float, float, float]]") -> None:
        for place, (title, (launches, microseconds, layer)) in enumerate(figures.items()):
            name = [] if len(runs) == 1 else [title]
            numbers = (f"{launches:.1f}", f"{microseconds:.0f}", f"{layer:.1f}")
            table.add_row("" if place else kind, *name, *numbers)

    totals = {title: census.by_class() for title, census in runs.items()}
    for kind in KernelClass:
        layers = {title: census.gdn_layer.get(kind, 0.0) for title, census in runs.items()}
        add(kind.value, {title: (*totals[title][kind], layers[title]) for title in runs})
    table.add_section()
    everything = {}
    for title, census in runs.items():
        launches, microseconds = (sum(one) for one in zip(*totals[title].values(), strict=True))
        everything[title] = (launches, microseconds, sum(census.gdn_layer.values()))
    add("all", everything)
    return table


def kernel_table(census: Census, title: str) -> Table:
    """The kernels that are launched most often."""
    table = Table(title=f"{title}: most launched", title_justify="left")
    table.add_column("kernel", overflow="fold")
    table.add_column("class", no_wrap=True)
    table.add_column("launches", justify="right", no_wrap=True)
    table.add_column("µs", justify="right", no_wrap=True)
    for kernel in census.kernels[:_KERNELS_SHOWN]:
        name = kernel.name if len(kernel.name) <= _NAME_SHOWN else f"{kernel.name[:_NAME_SHOWN]}…"
        table.add_row(
            name, kernel.kind.value, f"{kernel.launches:.1f}", f"{kernel.microseconds:.0f}"
        )
    left = len(census.kernels) - _KERNELS_SHOWN
    if left > 0:
        table.caption = f"and {left} more; --json has all"
    return table


def draw(runs: "Mapping[str, Census]", path: Path) -> None:
    """Bars of the launches a step of each class, one colour a run, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KernelClass if any(run.by_class()[kind][0] for run in runs.values())]
    width = 0.8 / len(runs)
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for index, (title, census) in enumerate(runs.items()):
        launches = [census.by_class()[kind][0] for kind in kinds]
        places = [place + index * width for place in range(len(kinds))]
        axes.bar_label(axes.bar(places, launches, width, label=title), fmt="%.0f", fontsize=8)
    centres = [place + width * (len(runs) - 1) / 2 for place in range(len(kinds))]
    axes.set_xticks(centres, [kind.value for kind in kinds], rotation=25, ha="right")
    axes.set_ylabel("launches a step")
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _require_gpu() -> None:
    from vllm.pre_ampere import devices

    if not devices.nvml_devices():
        raise UserError(
            "this box has no NVIDIA GPU, and only a GPU launches kernels to count; "
            "VLLM_PRE_AMPERE_EMULATE stands for the card's answers, not for its launches"
        )


def _count(
    model: Path, k: int, context: int, steps: int, engine: tuple[str, ...], on_progress: Any
) -> tuple[Census, str]:
    """The census of the first rank, and the device.

    Raises:
        UserError: the engine failed, or the context does not fit the model.
    """
    with tempfile.TemporaryDirectory(prefix="census-") as folder:
        job = Job(
            model=str(model),
            num_speculative_tokens=k,
            lengths=(context,),
            # As many as the steps would yield were every draft accepted.
            tokens=(_UNTRACED_STEPS + steps + 1) * (k + 1),
            engine_arguments=("--no-enable-prefix-caching", *engine),
            traces=folder,
            untraced_steps=_UNTRACED_STEPS,
            traced_steps=steps,
        )
        result = generate(job, lambda done, total: on_progress())
        if result.left_out:
            raise UserError(
                f"--context {context} and {job.tokens} tokens to generate are more than the "
                "model's context; pass fewer of --context or --steps"
            )
        traces = sorted(Path(folder).rglob("*.pt.trace.json*"))
        if not traces:
            raise UserError(f"the profiler left no trace of {steps} steps")
        return read_trace(traces[0], own_triton_kernels()), result.device
