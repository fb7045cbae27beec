# SPDX-License-Identifier: Apache-2.0
"""The registry chooses by need, and says what was needed and what was there."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.kernels import host, reference, registry, upstream
from vllm.pre_ampere.kernels.kernel import Kernel, Problem
from vllm.pre_ampere.kernels.reference import chunk, convolution, recurrent
from vllm.pre_ampere.kernels.registry import KernelUnavailableError, select
from vllm.pre_ampere.kernels.triton import packed_delta_rule

PASCAL = Device(0, "Tesla P100", (6, 0))
VOLTA = Device(0, "Tesla V100", (7, 0))
XAVIER = Device(0, "Jetson AGX Xavier", (7, 2))
TURING = Device(0, "Quadro RTX 8000", (7, 5))
TURING_WITHOUT_TENSOR_CORES = Device(0, "GeForce GTX 1660", (7, 5))
AMPERE = Device(0, "NVIDIA A100", (8, 0))
CARDS = (PASCAL, VOLTA, XAVIER, TURING, TURING_WITHOUT_TENSOR_CORES, AMPERE)

OPERATIONS = (
    "gdn_prefill",
    "gdn_decode",
    "gdn_post_convolution",
    "convolution_prefill",
    "convolution_update",
)
KERNELS = [kernel for operation in OPERATIONS for kernel in registry.kernels(operation)]


def problem(
    operation: str = "gdn_prefill",
    dtype: torch.dtype = torch.float16,
    head_dim_k: int = 128,
    head_dim_v: int = 128,
) -> Problem:
    return Problem(operation, dtype, head_dim_k, head_dim_v)


def kernel(operation: str, name: str) -> Kernel:
    return next(k for k in registry.kernels(operation) if k.name == name)


def by_id(k: Kernel) -> str:
    return f"{k.operation}-{k.name}"


def test_turing_prefill_is_triton_because_of_flashqla_memory() -> None:
    selection = select("gdn_prefill", problem(), TURING)
    assert selection.kernel.name == "triton"
    assert [(k.name, reason) for k, reason in selection.passed_over] == [
        (
            "flashqla_sm70",
            "needs 86016 B of shared memory a block; this card (sm75, Quadro RTX 8000) has 65536 B",
        )
    ]


@pytest.mark.parametrize("card", [VOLTA, XAVIER], ids=lambda card: card.architecture)
def test_volta_passes_flashqla_over_only_because_it_is_not_built(card: Device) -> None:
    selection = select("gdn_prefill", problem(), card)
    assert selection.kernel.name == "triton"
    assert [(k.name, reason) for k, reason in selection.passed_over] == [
        ("flashqla_sm70", "is not part of this release")
    ]
    built = replace(kernel("gdn_prefill", "flashqla_sm70"), missing=None)
    assert built.unmet(problem(), card, on_cpu=False) is None
    assert "65536" in str(built.unmet(problem(), TURING, on_cpu=False))


def test_flashqla_stays_off_turing_by_memory_alone() -> None:
    """With a block as large as Volta's, nothing else keeps the kernel off the card."""
    built = replace(kernel("gdn_prefill", "flashqla_sm70"), missing=None)
    smaller = replace(built, shared_memory={(128, 128): 65536})
    assert smaller.unmet(problem(), TURING, on_cpu=False) is None


def test_vlk_fits_turing_but_is_used_only_by_request() -> None:
    vlk = kernel("gdn_prefill", "vlk")
    assert replace(vlk, missing=None).unmet(problem(), TURING, on_cpu=False) is None
    assert vlk.by_request is not None
    for figure in ("1.32", "15 %", "2048", "21 %", "8192"):
        assert figure in vlk.by_request
    for card in (VOLTA, TURING):
        considered = select("gdn_prefill", problem(), card, on_cpu=True).passed_over
        assert "vlk" not in [k.name for k, _ in considered]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_gpus_get_triton_and_cpus_the_reference(operation: str, card: Device) -> None:
    expected = "packed_triton" if operation == "gdn_decode" else "triton"
    assert select(operation, problem(operation), card).kernel.name == expected
    assert select(operation, problem(operation), card, on_cpu=True).kernel.name == "reference"


REFUSALS = [
    pytest.param(
        kernel("gdn_prefill", "flashqla_sm70"),
        problem(),
        AMPERE,
        False,
        "has code for sm70, sm72, sm75; this card (sm80, NVIDIA A100) is sm80",
        id="architecture",
    ),
    pytest.param(
        kernel("gdn_prefill", "vlk"),
        problem(),
        TURING_WITHOUT_TENSOR_CORES,
        False,
        "needs tensor cores; this card (sm75, GeForce GTX 1660) has none",
        id="tensor cores",
    ),
    pytest.param(
        kernel("gdn_prefill", "vlk"),
        problem(dtype=torch.float32),
        TURING,
        False,
        "takes float16; the model runs in float32",
        id="dtype",
    ),
    pytest.param(
        kernel("gdn_prefill", "triton"),
        problem(dtype=torch.bfloat16),
        TURING,
        False,
        "would compute in bfloat16, which needs sm80; this card (sm75, Quadro RTX 8000) is sm75",
        id="bfloat16",
    ),
    pytest.param(
        kernel("gdn_prefill", "triton"),
        problem(head_dim_k=512),
        TURING,
        False,
        "takes K up to 256; the model has K=512",
        id="largest K",
    ),
    pytest.param(
        kernel("gdn_prefill", "flashqla_sm70"),
        problem(head_dim_k=64, head_dim_v=96),
        VOLTA,
        False,
        "takes K=128, V=128; the model has K=64, V=96",
        id="head dimensions",
    ),
    pytest.param(
        kernel("gdn_prefill", "flashqla_sm70"),
        problem(),
        TURING,
        False,
        "needs 86016 B of shared memory a block; this card (sm75, Quadro RTX 8000) has 65536 B",
        id="shared memory",
    ),
    pytest.param(
        kernel("gdn_decode", "flashqla"),
        problem("gdn_decode"),
        VOLTA,
        False,
        "is not part of this release",
        id="missing",
    ),
    pytest.param(
        kernel("gdn_decode", "triton"),
        problem("gdn_decode"),
        TURING,
        True,
        "runs on a GPU; this box computes on its CPU",
        id="gpu on a cpu box",
    ),
    pytest.param(
        kernel("gdn_decode", "reference"),
        problem("gdn_decode"),
        TURING,
        False,
        "runs on a CPU; this box computes on its GPU",
        id="cpu on a gpu box",
    ),
]


@pytest.mark.parametrize(("refused", "asked", "card", "on_cpu", "reason"), REFUSALS)
def test_each_refusal_says_what_was_needed_and_what_was_there(
    refused: Kernel, asked: Problem, card: Device, on_cpu: bool, reason: str
) -> None:
    assert refused.unmet(asked, card, on_cpu) == reason


@pytest.mark.parametrize("declared", KERNELS, ids=by_id)
def test_every_need_that_a_kernel_declares_is_enforced(declared: Kernel) -> None:
    """Each need alone, violated alone, on a kernel that would otherwise run."""
    built = replace(declared, missing=None)
    on_cpu = declared.runs_on == "cpu"
    good, card = problem(declared.operation), VOLTA
    assert built.unmet(good, card, on_cpu) is None
    assert built.unmet(good, card, not on_cpu) is not None
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int8):
        reason = built.unmet(replace(good, dtype=dtype), card, on_cpu)
        assert (reason is None) == (dtype in built.dtypes)
    if built.architectures is not None:
        assert built.architectures == {(7, 0), (7, 2), (7, 5)}
        assert "sm60" in str(built.unmet(good, PASCAL, on_cpu))
    if built.needs_tensor_cores:
        reason = built.unmet(good, TURING_WITHOUT_TENSOR_CORES, on_cpu)
        assert "tensor cores" in str(reason)
    if built.max_head_dim_k is not None:
        largest = built.max_head_dim_k
        assert built.unmet(replace(good, head_dim_k=largest), card, on_cpu) is None
        reason = str(built.unmet(replace(good, head_dim_k=largest + 1), card, on_cpu))
        assert str(largest) in reason
        assert str(largest + 1) in reason
    if built.shared_memory is not None:
        assert "K=64" in str(built.unmet(replace(good, head_dim_k=64), card, on_cpu))
        enormous = replace(built, shared_memory={(128, 128): 98305})
        reason = str(enormous.unmet(good, card, on_cpu))
        assert "98305 B" in reason
        assert "98304 B" in reason
    if declared.missing is not None:
        assert declared.unmet(good, card, on_cpu) == declared.missing


@pytest.mark.parametrize(
    ("name", "card", "on_cpu", "message"),
    [
        (
            "flashqla_sm70",
            TURING,
            False,
            "--gdn-prefill-backend flashqla_sm70: flashqla_sm70 needs 86016 B of shared memory a "
            "block; this card (sm75, Quadro RTX 8000) has 65536 B. On this card use triton, or "
            "leave the setting out",
        ),
        (
            "triton",
            TURING,
            True,
            "--gdn-prefill-backend triton: triton runs on a GPU; this box computes on its CPU. On "
            "this card use reference, or leave the setting out",
        ),
        (
            "flashinfer",
            VOLTA,
            False,
            "--gdn-prefill-backend flashinfer: flashinfer is no kernel for gdn_prefill; there are "
            "flashqla_sm70, triton, vlk, reference. On this card use triton, or leave the setting "
            "out",
        ),
    ],
)
def test_a_kernel_asked_for_by_name_that_cannot_run_is_an_error(
    name: str, card: Device, on_cpu: bool, message: str
) -> None:
    with pytest.raises(KernelUnavailableError) as raised:
        select("gdn_prefill", problem(), card, name, on_cpu=on_cpu)
    assert str(raised.value) == message
    assert isinstance(raised.value, ValueError)


def test_a_kernel_asked_for_by_name_that_can_run_is_taken() -> None:
    selection = select("gdn_prefill", problem(), TURING, "triton")
    assert (selection.kernel.name, selection.passed_over) == ("triton", ())
    assert selection.requested == "triton"
    assert select("gdn_prefill", problem(), TURING).requested is None


def test_without_any_kernel_the_error_names_every_reason() -> None:
    with pytest.raises(KernelUnavailableError) as raised:
        select("gdn_prefill", problem(dtype=torch.float32), VOLTA)
    assert str(raised.value) == (
        "no kernel for gdn_prefill can run: flashqla_sm70 takes float16; the model runs in "
        "float32; triton takes bfloat16 or float16; the model runs in float32; reference runs on "
        "a CPU; this box computes on its GPU"
    )


def test_a_kernel_that_a_setting_switched_off_is_not_considered() -> None:
    selection = select("gdn_decode", problem("gdn_decode"), TURING, excluded=("flashqla",))
    assert (selection.kernel.name, selection.passed_over) == ("packed_triton", ())
    with pytest.raises(KernelUnavailableError, match="flashqla is no kernel for gdn_decode"):
        select("gdn_decode", problem("gdn_decode"), TURING, "flashqla", excluded=("flashqla",))


def test_an_unknown_operation_is_an_error() -> None:
    with pytest.raises(KeyError):
        registry.kernels("gdn_training")


@pytest.mark.parametrize("declared", KERNELS, ids=by_id)
def test_kernels_load_what_the_layer_can_call(declared: Kernel) -> None:
    if declared.missing is not None:
        with pytest.raises(KernelUnavailableError, match="does not exist in this release"):
            declared.load()
        return
    loaded = declared.load()
    reference_kernel = kernel(declared.operation, "reference").load()
    assert inspect.signature(loaded) == inspect.signature(reference_kernel)
    module = packed_delta_rule if declared.name == "packed_triton" else upstream
    assert loaded.__module__ == module.__name__ or declared.runs_on == "cpu"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("causal_conv1d_prefill", convolution),
        ("causal_conv1d_update", convolution),
        ("fused_sigmoid_gating_delta_rule_update", recurrent),
        ("packed_delta_rule_update", packed_delta_rule),
        ("post_convolution", chunk),
        ("chunk_gated_delta_rule", chunk),
    ],
)
def test_callers_arguments_start_as_the_definitions_do(name: str, module: object) -> None:
    """What the layer passes by position is what the definition takes by position."""
    called = list(inspect.signature(getattr(host, name)).parameters)
    defined = [p for p in inspect.signature(getattr(module, name)).parameters if p != "chunk_size"]
    assert called[: len(defined)] == defined


def test_the_definitions_import_nothing_but_torch() -> None:
    folder = Path(inspect.getfile(reference)).parent
    imported = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(node.module)
    ours = {name for name in imported if str(name).startswith(reference.__name__)}
    assert imported - ours == {"torch"}
