# SPDX-License-Identifier: Apache-2.0
"""The program that compiles a model's launches for one card; started by `run`.

    python -m vllm.pre_ampere.preflight.compile_for_card REQUEST TABLES

REQUEST is a `Request` as JSON; TABLES receives a `Results`. A process of its own, because it tells
Triton, PyTorch and upstream that they are on another machine.
"""

import logging
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Capability
from vllm.pre_ampere.preflight.model import ModelShapes
from vllm.pre_ampere.preflight.report import Lowering, Results, Table

logger = logging.getLogger("vllm.pre_ampere.preflight")


class Request(BaseModel):
    """What to compile.

    Attributes:
        capability: the card's.
        lowering: how matrix products are compiled.
        models: one table is made for each.
        complete: compile every configuration that autotuning would try, of the launches that it
            would try some of.
        cache: folder in which Triton keeps what it compiles.
        only: beginnings of the names of the launches to make; empty for all.
    """

    model_config = ConfigDict(frozen=True)

    capability: Capability
    lowering: Lowering
    models: tuple[ModelShapes, ...]
    complete: bool
    cache: Path
    only: tuple[str, ...] = ()


def compile_tables(request: Request) -> Results:
    """Pose as the card, make the launches, and say what was compiled."""
    from vllm.pre_ampere.preflight import card

    device = card.pose_as(request.capability)
    # After `pose_as`: these import Triton's users.
    import triton

    from vllm.pre_ampere.kernels.triton import batch_invariant_linear, launch_configurations
    from vllm.pre_ampere.platform import triton_set_up
    from vllm.pre_ampere.preflight import inspection
    from vllm.pre_ampere.preflight.launches import AUTOTUNED, launches

    tensor_cores = request.lowering is Lowering.TENSOR_CORES
    planned = {shapes: launches(shapes, tensor_cores) for shapes in request.models}
    card.see_cuda()
    lowering = triton_set_up.choose_lowering(device, tensor_cores)
    if tensor_cores and lowering != "sm75 tensor cores":
        raise RuntimeError(f"Triton {triton.__version__} has no tensor-core lowering here")
    batch_invariant_linear.use(lowering)
    tuners = card.kernels(triton.runtime.autotuner.Autotuner)
    tuned = {t.base_fn.__name__: frozenset(t.configs[0].kwargs) for t in tuners}
    if not request.complete:
        launch_configurations.pin(lowering)
    for tuner in tuners:
        inspection.drop_pipeline_depths(tuner)
    tables = []
    for shapes, made in planned.items():
        card.forget_compiled_kernels()
        observer = inspection.CompilationObserver(device, tuned)
        for name, launch in made.items():
            if request.only and not name.startswith(request.only):
                continue
            if request.complete and name not in AUTOTUNED:
                continue
            observer.watch(name)
            try:
                launch(shapes)
            except triton.runtime.errors.OutOfResources as refused:
                # Its finding is there already, over the limit: it is compiled before it is refused.
                logger.info("%s of %s: %s", name, shapes.label, refused)
            except (
                triton.CompilationError,
                triton.runtime.errors.PTXASError,
                RuntimeError,  # A pass of the compiler's that fails; it has no class of its own.
            ) as error:
                if not observer.is_compiling:
                    raise
                observer.failed(str(error).splitlines()[-1])
        tables.append(
            Table(
                model=shapes.label,
                architecture=device.architecture,
                lowering=request.lowering,
                triton=triton.__version__,
                complete=request.complete,
                findings=observer.findings,
            )
        )
    return Results(tables=tuple(tables))


def main(request_path: str, tables_path: str) -> None:
    """Read the request, write the tables."""
    request = Request.model_validate_json(Path(request_path).read_text())
    environment.TRITON_CACHE_DIR.set(str(request.cache))
    environment.CUDA_VISIBLE_DEVICES.set("")  # Nothing is run, whatever the box has.
    Path(tables_path).write_text(compile_tables(request).model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
