# SPDX-License-Identifier: Apache-2.0
"""Guard 7: which quantised checkpoints load, by upstream's rules, and what the refusal says."""

import logging
from pathlib import Path

import pytest
import torch
from vllm.config import KernelConfig, get_current_vllm_config_or_none
from vllm.distributed import parallel_state
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.inc.schemes.inc_fp8_linear import INCFp8LinearScheme
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards import quantization
from vllm.pre_ampere.guards.quantization import LAYERS, Support, support
from vllm.pre_ampere.guards.quantized_formats import FORMATS, Format
from vllm.pre_ampere.guards.quantized_refusals import refuse_unsupported

T4 = Device(0, "Tesla T4", (7, 5))
V100 = Device(1, "Tesla V100", (7, 0))
DOCUMENT = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_the_document_holds_the_table_that_upstreams_rules_give() -> None:
    """Where it fails: `python -m vllm.pre_ampere.guards.quantization docs/quantization.md`."""
    assert quantization.table() in DOCUMENT.read_text()


def test_a_changed_document_is_written_back(tmp_path: Path) -> None:
    document = tmp_path / "quantization.md"
    document.write_text("Before.\n\n| checkpoint | old |\n| --- | --- |\n| x | y |\n\nAfter.\n")
    quantization.update(document)
    assert document.read_text() == f"Before.\n\n{quantization.table()}\nAfter.\n"


def named(name: str, method: str | None = None) -> Format:
    (found,) = [x for x in FORMATS if x.name == name and method in (None, x.method)]
    return found


def test_every_format_is_one_that_upstream_quantises() -> None:
    """Otherwise a mistake in a configuration here would pass as a card that takes everything."""
    for each in FORMATS:
        for layer in LAYERS:
            assert "Unquantized" not in support(each, (7, 5), layer).how


def test_both_answers_occur_on_a_turing_card_for_both_layers() -> None:
    for layer in LAYERS:
        assert {support(each, (7, 5), layer).loads for each in FORMATS} == {True, False}


def test_a_volta_card_has_quarks_int4_and_some_quantised_experts() -> None:
    linear, experts = (
        {
            (each.name, each.method): answer.how
            for each in FORMATS
            if (answer := support(each, (7, 0), layer)).loads
        }
        for layer in LAYERS
    )
    assert linear == {
        ("INT4 weights (W4A16)", "quark"): "Exllama",
        ("INT4 weights with zero points (W4A16)", "quark"): "TritonW4A16",
    }
    assert experts == {
        ("GPTQ, 4 bits", "gptq"): "Int4EmulationTriton",
        ("GPTQ, 4 bits, by request", "moe_wna16"): "TritonWNA16",
        ("GPTQ, 8 bits, by request", "moe_wna16"): "TritonWNA16",
        ("AutoRound packed as GPTQ, 4 bits", "inc"): "Int4EmulationTriton",
        ("AutoRound packed as AWQ, 4 bits", "inc"): "Int4EmulationTriton",
        ("INT4 weights (W4A16)", "quark"): "TritonWNA16",
        ("INT4 weights with zero points (W4A16)", "quark"): "TritonWNA16",
        ("INT4 weights (W4A16)", "compressed-tensors"): "TritonWNA16",
        ("INT8 weights (W8A16)", "compressed-tensors"): "TritonWNA16",
        ("NVFP4", "compressed-tensors"): "Nvfp4QuantizationEmulationTriton",
    }


@pytest.mark.parametrize(("bits", "weight_type"), [(4, "uint4b8"), (8, "uint8b128")])
def test_the_constructor_of_gptq_refuses_volta_though_a_kernel_takes_it(
    bits: int, weight_type: str
) -> None:
    assert support(named(f"GPTQ, {bits} bits"), (7, 5)) == Support(True, "Marlin")
    refused = Support(False, f"Marlin does not support weight_bits = {weight_type}")
    assert support(named(f"GPTQ, {bits} bits"), (7, 0)) == refused

    layer = MPLinearLayerConfig(
        full_weight_shape=(4096, 4096),
        partition_weight_shape=(4096, 4096),
        weight_type=getattr(scalar_types, weight_type),
        act_type=torch.float16,
        group_size=128,
        zero_points=False,
    )
    configuration = AutoGPTQConfig(bits, 128, False, True, False, {}, {})
    with quantization.as_cuda_card((7, 0)):
        assert choose_mp_linear_kernel(layer, 70).__name__ == "ExllamaLinearKernel"
        with pytest.raises(ValueError, match=f"weight_bits = {weight_type}"):
            AutoGPTQLinearMethod(configuration)


@pytest.mark.parametrize("bits", [4, 8])
def test_auto_round_packed_as_gptq_is_refused_on_volta(bits: int) -> None:
    asked = named(f"AutoRound packed as GPTQ, {bits} bits")
    assert support(asked, (7, 5)) == Support(True, "Marlin")
    message = f"INC quantization with bits={bits}, sym=True is not supported"
    assert support(asked, (7, 0)) == Support(False, message)


def test_auto_round_packed_as_awq_is_not_refused_on_volta_but_its_kernel_needs_turing() -> None:
    asked = named("AutoRound packed as AWQ, 4 bits")
    assert support(asked, (7, 5)) == Support(True, "Marlin")
    assert support(asked, (7, 0)) == Support(False, "not refused, but AutoAWQ needs 7.5")


def test_auto_round_never_asks_its_fp8_scheme_which_needs_turing() -> None:
    asked = named("AutoRound, FP8 in blocks")
    assert support(asked, (7, 5)) == Support(True, "MarlinFP8ScaledMM")
    message = "not refused, but TritonFp8BlockScaledMM needs 7.5"
    assert support(asked, (7, 0)) == Support(False, message)
    assert INCFp8LinearScheme.get_min_capability() == 75


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_by_request_takes_the_constructor_of_gptq_for_linear_layers(bits: int) -> None:
    asked = named(f"GPTQ, {bits} bits, by request")
    assert support(asked, (7, 0)) == support(named(f"GPTQ, {bits} bits"), (7, 0))
    assert support(asked, (7, 0), "experts") == Support(True, "TritonWNA16")


def test_int8_experts_are_upstreams_choice_of_backend() -> None:
    asked = named("INT8 (W8A8)")
    assert support(asked, (7, 5), "experts") == Support(True, "Triton")
    message = "No Int8 MoE backend supports the deployment configuration"
    assert support(asked, (7, 0), "experts") == Support(False, message)
    key = (kInt8StaticChannelSym, kInt8DynamicTokenSym)
    for capability, taken in (((7, 5), True), ((7, 0), False)):
        with quantization.as_cuda_card(capability):
            assert TritonExperts._supports_quant_scheme(*key) is taken


def test_int8_linear_layers_reach_triton_on_a_turing_card_by_request_alone() -> None:
    """What preflight launches of INT8 follows from this and from the experts' backend."""
    asked, wish = named("INT8 (W8A8)"), KernelConfig(linear_backend="triton")
    assert support(asked, (7, 5)) == Support(True, "CutlassInt8ScaledMM")
    assert support(asked, (7, 5), "linear", wish) == Support(True, "TritonInt8ScaledMM")
    for kernels in (None, wish):
        assert support(asked, (7, 0), "linear", kernels) == Support(False, "needs 7.5")


def test_turing_takes_mxfp4_in_experts_of_compressed_tensors_only() -> None:
    packed, compressed = named("MXFP4", "mxfp4"), named("MXFP4", "compressed-tensors")
    for each in (packed, compressed):
        assert support(each, (7, 5)) == Support(False, "needs 8.0")
    assert support(packed, (7, 5), "experts") == Support(False, "needs 8.0")
    assert support(compressed, (7, 5), "experts") == Support(True, "Marlin")
    unasked = Support(False, "not refused, but Marlin does not take the card")
    assert support(compressed, (7, 0), "experts") == unasked


def test_the_refusal_names_the_capabilities_and_the_formats_that_load() -> None:
    with pytest.raises(
        ValueError, match=r"modelopt needs capability 8\.0; Tesla T4 has 7\.5"
    ) as info:
        refuse_unsupported("modelopt", T4)
    linear = [each for each in FORMATS if support(each, (7, 5)).loads]
    for each in linear:
        both = support(each, (7, 5), "experts").loads
        where = "" if both else ", nothing but linear layers quantised"
        assert f"{each.name} ({each.method}{where})" in str(info.value)
    assert "AutoRound, FP8 in blocks (inc, nothing but linear layers quantised)" in str(info.value)
    experts = "MXFP4 (compressed-tensors, nothing but experts quantised)"
    assert experts in str(info.value)
    assert str(info.value).count(";") == len(linear) + 1
    with pytest.raises(ValueError, match=r"awq needs capability 7\.5; Tesla V100 has 7\.0"):
        refuse_unsupported("awq", V100)


def test_the_refusal_on_volta_says_which_formats_load_with_nothing_but_experts_quantised() -> None:
    with pytest.raises(ValueError, match=r"needs capability 7\.5") as info:
        refuse_unsupported("awq", V100)
    assert str(info.value).endswith(
        "Use a checkpoint in one of these formats: "
        "GPTQ, 4 bits (gptq, nothing but experts quantised); "
        "GPTQ, 4 bits, by request (moe_wna16, nothing but experts quantised); "
        "GPTQ, 8 bits, by request (moe_wna16, nothing but experts quantised); "
        "AutoRound packed as GPTQ, 4 bits (inc, nothing but experts quantised); "
        "AutoRound packed as AWQ, 4 bits (inc, nothing but experts quantised); "
        "INT4 weights (W4A16) (quark); "
        "INT4 weights with zero points (W4A16) (quark); "
        "INT4 weights (W4A16) (compressed-tensors, nothing but experts quantised); "
        "INT8 weights (W8A16) (compressed-tensors, nothing but experts quantised); "
        "NVFP4 (compressed-tensors, nothing but experts quantised)"
    )


def test_a_mistake_in_a_configuration_is_no_answer() -> None:
    with pytest.raises(ValueError, match="bits"):
        support(Format("wrong", "gptq", {"group_size": 128}), (7, 5))


def test_what_may_load_is_not_refused() -> None:
    """Whether a checkpoint quantises more than its experts does not show in the method's name."""
    refuse_unsupported("gptq", V100)
    refuse_unsupported("awq", T4)


def test_the_platform_is_itself_again_after_the_question() -> None:
    before = (current_platform._enum, current_platform.get_device_capability())
    disabled, rank = logging.root.manager.disable, parallel_state._TP
    configuration = get_current_vllm_config_or_none()
    for layer in LAYERS:
        support(FORMATS[0], (7, 5), layer)
    assert (logging.root.manager.disable, parallel_state._TP) == (disabled, rank)
    assert get_current_vllm_config_or_none() is configuration
    assert (current_platform._enum, current_platform.get_device_capability()) == before
    assert before[0] is PlatformEnum.CPU
