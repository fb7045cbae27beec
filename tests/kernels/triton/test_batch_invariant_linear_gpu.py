# SPDX-License-Identifier: Apache-2.0
"""A row of a batch-invariant linear layer has the same bits alone and in any batch, in any tile.

Needs a GPU. On one newer than Turing, kernels are lowered for the old card and assembled for that chip:
    python -m pytest -m gpu tests/kernels/triton/test_batch_invariant_linear_gpu.py
"""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.model_executor.determinism.batch_invariant import matmul_kernel_persistent

from vllm.pre_ampere.devices import emulated_devices
from vllm.pre_ampere.emulation import lower_for
from vllm.pre_ampere.kernels.triton import batch_invariant_linear, turing_mma
from vllm.pre_ampere.kernels.triton.launch_configurations import Lowering

pytestmark = pytest.mark.gpu


@pytest.fixture(params=get_args(Lowering))
def lowering(request: pytest.FixtureRequest) -> Iterator[Lowering]:
    chosen: Lowering = request.param
    capability = (7, 0) if chosen == "sm70" else (7, 5)
    (card,) = emulated_devices([capability], 1)
    lower_for(card)
    if chosen == "sm75 tensor cores":
        assert turing_mma.enable()
    # What was loaded for another lowering is looked up again.
    matmul_kernel_persistent.device_caches.clear()
    batch_invariant_linear.use(chosen)
    yield chosen
    turing_mma.disable()
    matmul_kernel_persistent.device_caches.clear()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 200),
    features=st.tuples(st.integers(1, 700), st.integers(1, 300)),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_a_row_has_the_same_bits_in_any_batch(
    lowering: Lowering,
    rows: int,
    features: tuple[int, int],
    with_bias: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, features[0], device="cuda", generator=generator).half()
    weight = torch.randn(features[1], features[0], device="cuda", generator=generator).half()
    bias = torch.randn(features[1], device="cuda", generator=generator).half()
    whole = batch_invariant_linear.call(x, weight, bias if with_bias else None)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    part = batch_invariant_linear.call(x[first:last], weight, bias if with_bias else None)
    assert torch.equal(part, whole[first:last])
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    size = x.double().abs() @ weight.double().abs().T
    bound = exact.abs() * 2.0**-11 + 2.0**-25 + (size + exact.abs()) * features[0] * 2.0**-22
    assert torch.all((whole.double() - exact).abs() <= bound)


# Gate and up projection of Qwen3.5-27B on two cards, and the vocabulary of Qwen3.5-4B.
@pytest.mark.parametrize("shape", [(17408, 5120), (248320, 2560)], ids=str)
def test_decoded_verified_and_prefilled_rows_of_a_model_agree(
    lowering: Lowering, shape: tuple[int, int]
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    weight = torch.randn(*shape, device="cuda", generator=generator).half() / shape[1] ** 0.5
    x = torch.randn(130, shape[1], device="cuda", generator=generator).half()
    whole = batch_invariant_linear.call(x, weight)
    for rows in (1, 4, 16, 17, 64, 65):
        assert torch.equal(batch_invariant_linear.call(x[:rows], weight), whole[:rows])


def test_it_meets_the_tensor_cores(lowering: Lowering) -> None:
    x = torch.ones(4, 64, device="cuda").half()
    batch_invariant_linear.call(x, torch.ones(64, 64, device="cuda").half())
    caches = matmul_kernel_persistent.device_caches.values()
    compiled = [kernel for cache in caches for kernel in cache[0].values()]
    assert compiled
    on_tensor_cores = ["mma.sync" in kernel.asm["ptx"] for kernel in compiled]
    assert on_tensor_cores == [lowering == "sm75 tensor cores"] * len(compiled)
