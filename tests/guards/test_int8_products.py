# SPDX-License-Identifier: Apache-2.0
"""Guard 7: products of int8 in Triton, which compile for Turing's tensor cores only.

Upstream's rules ask for capability 7.5 and nothing else there. tests/preflight has the compiler's own
answer.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_process import TINY_MODEL, ask, clean_environment
from safetensors.torch import save_file
from vllm.config import KernelConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from vllm.pre_ampere import environment
from vllm.pre_ampere.cli.diagnosis import serving
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards.quantization import LAYERS, Support, answer, support, why_no_int8
from vllm.pre_ampere.guards.quantized_formats import FORMATS, Format
from vllm.pre_ampere.guards.quantized_refusals import refuse_layers, refuse_unsupported

GTX_1660 = Device(0, "NVIDIA GeForce GTX 1660 Ti", (7, 5))
T4 = Device(1, "Tesla T4", (7, 5))
V100 = Device(2, "Tesla V100-SXM2-32GB", (7, 0))
A6000 = Device(3, "NVIDIA RTX A6000", (8, 6))
P100 = Device(4, "Tesla P100-PCIE-16GB", (6, 0))

(W8A8,) = (each for each in FORMATS if each.name == "INT8 (W8A8)")
NEEDS = "multiplies int8, which compiles for Turing's tensor cores only, and"
BARE = "the card has none"
SWITCHED_OFF = "VLLM_PRE_AMPERE_TURING_MMA=0 keeps products off them"
EXPERT = "model.layers.0.mlp.experts.0.down_proj.weight"
SHARED_EXPERT = "model.layers.0.mlp.shared_expert.down_proj.weight"

pytestmark = pytest.mark.usefixtures("clean_environment")


def store(folder: Path, *in_int8: str) -> None:
    """Weights of which those named are in int8."""
    tensors = {name: torch.zeros(16, 16, dtype=torch.int8) for name in in_int8}
    save_file({**tensors, "lm_head.weight": torch.zeros(2).half()}, folder / "model.safetensors")


def config(folder: Path, layers: tuple[str, ...], linear: str = "auto", row: Format = W8A8) -> Any:
    """What the guard reads of upstream's configuration."""
    experts = 8 if "experts" in layers else 0
    return SimpleNamespace(
        quant_config=CompressedTensorsConfig.from_config(dict(row.configuration)),
        kernel_config=KernelConfig(linear_backend=linear),
        model_config=SimpleNamespace(
            quantization=row.method,
            model=str(folder),
            revision=None,
            get_num_experts=lambda: experts,
        ),
    )


def refusal(asked: Any, *devices: Device) -> str | None:
    try:
        refuse_layers(asked, devices)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("card", "switch", "reason"),
    [
        (GTX_1660, None, BARE),
        (GTX_1660, "0", BARE),
        (T4, None, None),
        (T4, "1", None),
        (T4, "0", SWITCHED_OFF),
        (V100, None, BARE),
        (V100, "0", BARE),
    ],
)
def test_which_cards_have_products_of_int8(
    card: Device, switch: str | None, reason: str | None, clean_environment: pytest.MonkeyPatch
) -> None:
    if switch is not None:
        clean_environment.setenv(environment.TURING_MMA.name, switch)
    assert why_no_int8(card) == reason


def test_both_kinds_of_layers_are_refused_where_their_kernel_is_tritons() -> None:
    triton = KernelConfig(linear_backend="triton")
    linear = support(W8A8, (7, 5), "linear", triton, without_int8=BARE)
    assert linear == Support(False, f"TritonInt8ScaledMM {NEEDS} {BARE}", compiles=False)
    experts = support(W8A8, (7, 5), "experts", without_int8=BARE)
    assert experts == Support(False, f"Triton {NEEDS} {BARE}", compiles=False)
    cutlass = support(W8A8, (7, 5), without_int8=BARE)
    assert cutlass == Support(True, "CutlassInt8ScaledMM")


def test_no_other_row_multiplies_int8_in_triton() -> None:
    for each in FORMATS:
        for capability in ((7, 5), (7, 0)):
            for layer in LAYERS:
                for kernels in (None, KernelConfig(linear_backend="triton", moe_backend="triton")):
                    there = support(each, capability, layer, kernels, without_int8=BARE)
                    if each is W8A8 and capability == (7, 5) and not there.loads:
                        assert not there.compiles
                    else:
                        assert there == support(each, capability, layer, kernels)


@pytest.mark.parametrize("devices", [(GTX_1660,), (T4, GTX_1660), (A6000, GTX_1660, P100)])
def test_linear_layers_are_refused_if_one_card_has_no_tensor_cores(
    devices: tuple[Device, ...], tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    for switch in ("1", "0"):
        clean_environment.setenv(environment.TURING_MMA.name, switch)
        assert refusal(config(tmp_path, ("linear",), "triton"), *devices) == (
            "quantization compressed-tensors (INT8 (W8A8)) does not load on NVIDIA GeForce GTX "
            f"1660 Ti (sm75): TritonInt8ScaledMM {NEEDS} {BARE}. Leave the kernels to upstream: "
            "--linear-backend auto, --moe-backend auto"
        )
        assert refusal(config(tmp_path, ("linear",)), *devices) is None


def test_a_t4_with_the_lowering_off_has_two_ways_out(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, ("linear",), "triton")
    assert refusal(asked, T4) is None
    clean_environment.setenv(environment.TURING_MMA.name, "0")
    assert refusal(asked, T4) == (
        "quantization compressed-tensors (INT8 (W8A8)) does not load on Tesla T4 (sm75): "
        f"TritonInt8ScaledMM {NEEDS} {SWITCHED_OFF}. Leave VLLM_PRE_AMPERE_TURING_MMA out, or leave "
        "the kernels to upstream: --linear-backend auto, --moe-backend auto"
    )
    assert refusal(config(tmp_path, ("linear",)), T4) is None


def test_a_card_without_tensor_cores_beside_a_t4_leaves_one_way_out(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    clean_environment.setenv(environment.TURING_MMA.name, "0")
    message = refusal(config(tmp_path, ("linear",), "triton"), T4, GTX_1660)
    assert message is not None
    assert "VLLM_PRE_AMPERE_TURING_MMA" not in message
    assert "Leave the kernels to upstream" in message


def test_a_volta_card_is_refused_by_upstreams_rules(tmp_path: Path) -> None:
    for linear in ("auto", "triton"):
        message = refusal(config(tmp_path, ("linear",), linear), V100, T4)
        assert message is not None
        start = (
            "quantization compressed-tensors (INT8 (W8A8)) does not load on Tesla V100-SXM2-32GB"
        )
        assert message.startswith(f"{start} (sm70): needs 7.5. Use a checkpoint in one of these ")
        assert message.endswith(
            "formats: INT4 weights (W4A16) (quark); INT4 weights with zero points (W4A16) (quark)"
        )


def test_experts_are_left_to_upstream_where_the_weights_do_not_show_them(tmp_path: Path) -> None:
    """The checkpoint may have quantised linear layers only."""
    asked = config(tmp_path, LAYERS)
    assert refusal(asked, GTX_1660) is None
    store(tmp_path, SHARED_EXPERT)
    assert refusal(asked, GTX_1660) is None
    found = answer(asked, GTX_1660)
    assert found.layers["linear"] == Support(True, "CutlassInt8ScaledMM")
    assert found.layers["experts"] == Support(False, f"Triton {NEEDS} {BARE}", compiles=False)
    assert answer(asked, T4).layers["experts"] == Support(True, "Triton")


@pytest.mark.parametrize("devices", [(GTX_1660,), (T4, GTX_1660)])
def test_experts_whose_weights_are_in_int8_are_refused(
    devices: tuple[Device, ...], tmp_path: Path
) -> None:
    store(tmp_path, EXPERT, SHARED_EXPERT)
    asked = config(tmp_path, LAYERS)
    assert refusal(asked, T4, A6000) is None
    message = refusal(asked, *devices)
    assert message is not None
    start, formats = message.split(" Use a checkpoint in one of these formats: ")
    assert start == (
        "quantization compressed-tensors (INT8 (W8A8)) does not load on NVIDIA GeForce GTX 1660 Ti "
        f"(sm75): experts: Triton {NEEDS} {BARE}."
    )
    assert "INT8 weights (W8A16) (compressed-tensors); " in formats
    here = "INT8 (W8A8) (compressed-tensors, nothing but linear layers quantised); "
    assert here in formats


def test_experts_on_a_t4_with_the_lowering_off(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    store(tmp_path, EXPERT)
    clean_environment.setenv(environment.TURING_MMA.name, "0")
    assert refusal(config(tmp_path, LAYERS), T4) == (
        "quantization compressed-tensors (INT8 (W8A8)) does not load on Tesla T4 (sm75): experts: "
        f"Triton {NEEDS} {SWITCHED_OFF}. Leave VLLM_PRE_AMPERE_TURING_MMA out"
    )


def test_both_kinds_in_triton_are_refused_whatever_the_weights_show(tmp_path: Path) -> None:
    """Linear layers have another kernel: a way out for a checkpoint that quantised no experts."""
    asked = config(tmp_path, LAYERS, "triton")
    refused = f"linear: TritonInt8ScaledMM {NEEDS} {BARE}; experts: Triton {NEEDS} {BARE}. "
    message = refusal(asked, GTX_1660)
    assert message is not None
    assert message.endswith(
        f"{refused}Leave the kernels to upstream: --linear-backend auto, --moe-backend auto "
        "(nothing but linear layers quantised)"
    )
    store(tmp_path, EXPERT)
    message = refusal(asked, GTX_1660)
    assert message is not None
    assert f"{refused}Use a checkpoint in one of these formats: " in message


def test_another_refusal_names_the_format_as_the_card_takes_it() -> None:
    name = "INT8 (W8A8) (compressed-tensors"
    for card, where in ((T4, ")"), (GTX_1660, ", nothing but linear layers quantised)")):
        with pytest.raises(ValueError, match=r"needs capability 8\.0") as refused:
            refuse_unsupported("modelopt", card)
        assert f"{name}{where}; " in str(refused.value)


def test_the_doctors_row_says_the_same(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, LAYERS)
    row = serving._products(asked, GTX_1660)
    assert row.chosen == "linear: CutlassInt8ScaledMM"
    assert row.reason.endswith("loads where nothing but linear is quantised")
    assert row.passed_over == (("experts", f"Triton {NEEDS} {BARE}"),)

    assert serving._products(asked, T4).passed_over == ()
    clean_environment.setenv(environment.TURING_MMA.name, "0")
    row = serving._products(asked, T4)
    assert row.passed_over == (("experts", f"Triton {NEEDS} {SWITCHED_OFF}"),)


def test_an_emulated_t4_with_the_lowering_off_refuses_before_the_model_is_built(
    tmp_path: Path,
) -> None:
    description = json.loads((TINY_MODEL / "config.json").read_text())
    description["quantization_config"] = {**W8A8.configuration, "quant_method": W8A8.method}
    (tmp_path / "config.json").write_text(json.dumps(description))
    cases = [
        {"folder": str(tmp_path), "options": ["--linear-backend", backend]}
        for backend in ("triton", "auto")
    ]
    program = Path(__file__).with_name("ask_about_checkpoints.py")
    switched_off = clean_environment("7.5", VLLM_PRE_AMPERE_TURING_MMA="0")
    refused, taken = ask(program, cases, switched_off)
    assert refused["guard"].endswith(
        f"{SWITCHED_OFF}. Leave VLLM_PRE_AMPERE_TURING_MMA out, or leave the kernels to upstream: "
        "--linear-backend auto, --moe-backend auto"
    )
    assert refused["doctor"] == refused["guard"]
    assert (taken["guard"], taken["doctor"]) == (None, None)
    assert taken["products"][0]["chosen"] == "linear: CutlassInt8ScaledMM"
