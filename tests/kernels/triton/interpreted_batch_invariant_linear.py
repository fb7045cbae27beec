# SPDX-License-Identifier: Apache-2.0
"""Cases for Triton's interpreter, chosen by TRITON_INTERPRET=1 before Triton is imported.

`test_batch_invariant_linear.py` runs them in a process of their own.
"""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.pre_ampere.preflight import card

card.pose_as((7, 5))  # vLLM hides its Triton kernels where there is no card.

from vllm.pre_ampere.kernels.triton import batch_invariant_linear  # noqa: E402
from vllm.pre_ampere.kernels.triton.launch_configurations import Lowering  # noqa: E402


@settings(max_examples=12, deadline=None)
@given(
    lowering=st.sampled_from(get_args(Lowering)),
    rows=st.one_of(st.integers(1, 17), st.integers(63, 66), st.integers(127, 140)),
    features=st.tuples(st.sampled_from((16, 72, 130)), st.sampled_from((1, 40, 129))),
    with_bias=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_product_is_the_exact_one_rounded_once(
    lowering: Lowering,
    rows: int,
    features: tuple[int, int],
    with_bias: bool,
    strided: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, (1 + strided) * features[0], generator=generator).half()
    x = x[:, : features[0]]
    weight = torch.randn(features[1], features[0], generator=generator).half()
    bias = torch.randn(features[1], generator=generator).half() if with_bias else None
    batch_invariant_linear.use(lowering)
    out = batch_invariant_linear.batch_invariant_linear(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert out.dtype == torch.float16
    # Half a unit of float16's last place, and float32's error of the sum.
    size = x.double().abs() @ weight.double().abs().T
    bound = exact.abs() * 2.0**-11 + 2.0**-25 + (size + exact.abs()) * features[0] * 2.0**-24
    assert torch.all((out.double() - exact).abs() <= bound)


def test_a_bias_is_broadcast() -> None:
    x, weight = torch.ones(3, 16).half(), torch.ones(5, 16).half()
    for bias in (torch.full((1,), 2.0).half(), torch.full((), 2.0).half()):
        out = batch_invariant_linear.batch_invariant_linear(x, weight, bias)
        assert torch.equal(out, torch.full((3, 5), 18.0).half())


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(5, 32).half(), "32 columns of torch.float16 cannot take 16 columns of"),
        (torch.ones(5, 8).half(), "8 columns of torch.float16 cannot take 16 columns of"),
        (torch.ones(5, 16), "16 columns of torch.float32 cannot take 16 columns of torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(weight: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        batch_invariant_linear.batch_invariant_linear(torch.ones(3, 16).half(), weight, None)


@pytest.mark.parametrize("shape", [(0, 16), (2, 3, 16), (16,)])
def test_leading_dimensions_stay(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=torch.float16)
    out = batch_invariant_linear.batch_invariant_linear(x, torch.ones(5, 16).half(), None)
    assert out.shape == (*shape[:-1], 5)
    assert torch.all(out == 16)
