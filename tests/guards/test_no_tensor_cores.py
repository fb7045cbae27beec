# SPDX-License-Identifier: Apache-2.0
"""Guard 8: Turing cards without tensor cores (GTX 16xx)."""

import pytest
import torch
from engine_process import TINY_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import utils

from vllm.pre_ampere import upstream_patches
from vllm.pre_ampere.devices import Device
from vllm.pre_ampere.guards import configuration, without_tensor_cores
from vllm.pre_ampere.guards.without_tensor_cores import linear_without_tensor_cores

GTX_1660 = Device(0, "NVIDIA GeForce GTX 1660 Ti", (7, 5))
T4 = Device(1, "Tesla T4", (7, 5))
V100 = Device(1, "Tesla V100-SXM2-32GB", (7, 0))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    features=st.tuples(st.sampled_from((16, 96, 257)), st.sampled_from((1, 40, 129))),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_product_is_the_exact_one_rounded_once(
    rows: int, features: tuple[int, int], with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features[0], generator=generator).half()
    weight = torch.randn(features[1], features[0], generator=generator).half()
    bias = torch.randn(features[1], generator=generator).half() if with_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = linear_without_tensor_cores(x, weight, bias)
    assert out.dtype == torch.float16
    assert out.shape == exact.shape
    if rows > 1:
        # Half a unit of float16's last place, and float32's error of the sum.
        bound = exact.abs() * 2.0**-11 + 2.0**-24 + features[0] * 2.0**-23
        assert torch.all((out.double() - exact).abs() <= bound)


def test_a_weight_larger_than_a_slice_is_multiplied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_tensor_cores, "_SLICE_BYTES", 5 * 4 * 16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 16, generator=generator).half()
    weight, bias = torch.randn(23, 16, generator=generator).half(), torch.ones(23).half()
    sliced = linear_without_tensor_cores(x, weight, bias)
    monkeypatch.undo()
    assert torch.equal(sliced, linear_without_tensor_cores(x, weight, bias))
    assert sliced.shape == (2, 3, 23)


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "default_unquantized_gemm", utils.default_unquantized_gemm)
    monkeypatch.setattr(without_tensor_cores, "_ordinals_with_tensor_cores", frozenset())


@pytest.mark.usefixtures("unpatched")
def test_upstreams_product_is_replaced_only_where_a_card_needs_it() -> None:
    upstreams = utils.default_unquantized_gemm
    upstream_patches.apply([T4, V100])
    assert utils.default_unquantized_gemm is upstreams
    upstream_patches.apply([GTX_1660, T4])
    assert utils.default_unquantized_gemm is without_tensor_cores.unquantized_gemm
    assert without_tensor_cores._ordinals_with_tensor_cores == {1}


@pytest.mark.usefixtures("unpatched")
def test_the_operator_takes_upstreams_arguments_in_a_compiled_graph() -> None:
    upstream_patches.apply([GTX_1660])
    layer = torch.nn.Module()
    x, weight = torch.ones(3, 8).half(), torch.full((4, 8), 0.5).half()
    product = torch.compile(utils.default_unquantized_gemm, fullgraph=True, backend="eager")
    assert torch.equal(product(layer, x, weight, None), torch.full((3, 4), 4.0).half())
    assert product(layer, x.float(), weight.float(), None).dtype == torch.float32


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    result = VllmConfig()
    result.model_config = EngineArgs(
        model=str(TINY_MODEL), skip_tokenizer_init=True
    ).create_model_config()
    return result


def test_it_says_so(config: VllmConfig) -> None:
    action = configuration.say_that_tensor_cores_are_missing(config, [T4, GTX_1660])
    assert action is not None
    assert "GTX 1660 Ti has capability 7.5 but no tensor cores" in str(action)
    assert configuration.say_that_tensor_cores_are_missing(config, [T4, V100]) is None
