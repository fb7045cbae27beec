# SPDX-License-Identifier: Apache-2.0
"""The gates and the normalisation against the standard library's arithmetic."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere.kernels.reference.gating import gated_delta_net_gating, l2_normalize
from vllm.pre_ampere.kernels.reference.ragged import split_points, token_coordinates

VALUES = st.floats(-60, 60)


@given(VALUES, VALUES, st.floats(-8, 4), st.floats(-10, 10))
def test_gates_are_the_equations(a: float, b: float, A_log: float, bias: float) -> None:
    g, beta = gated_delta_net_gating(
        *(torch.tensor([[value]], dtype=torch.float64) for value in (a, b)),
        *(torch.tensor([value], dtype=torch.float64) for value in (A_log, bias)),
    )
    x = a + bias
    softplus = x if x > 20 else math.log1p(math.exp(x))
    assert g.item() == pytest.approx(-math.exp(A_log) * softplus, rel=1e-12, abs=1e-300)
    assert beta.item() == pytest.approx(1 / (1 + math.exp(-b)), rel=1e-12)


def test_gates_of_half_inputs_are_float32() -> None:
    """exp(A_log) beyond 65504 and softplus below 6e-8 are lost in half precision."""
    a, b = torch.full((1, 2), -17.0).half(), torch.zeros(1, 2).half()
    g, beta = gated_delta_net_gating(a, b, torch.tensor([12.0, 0.0]), torch.zeros(2))
    assert g.dtype == beta.dtype == torch.float32
    expected = [-math.exp(12) * math.log1p(math.exp(-17)), -math.log1p(math.exp(-17))]
    torch.testing.assert_close(g[0], torch.tensor(expected))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9))
def test_normalisation_adds_epsilon_to_the_sum_of_squares(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float64)
    norm = math.sqrt(math.fsum(value * value for value in values) + 1e-6)
    expected = torch.tensor([[value / norm for value in values]], dtype=torch.float64)
    torch.testing.assert_close(l2_normalize(x), expected, rtol=1e-12, atol=1e-15)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_tokens_know_their_request_and_position(lengths: list[int]) -> None:
    starts, counted = split_points(torch.tensor([0, *torch.tensor(lengths).cumsum(0)]))
    request, position = token_coordinates(counted)
    expected = [(r, p) for r, length in enumerate(lengths) for p in range(length)]
    assert list(zip(request.tolist(), position.tolist(), strict=True)) == expected
    assert counted.tolist() == lengths
    assert starts.tolist() == [sum(lengths[:r]) for r in range(len(lengths))]


def test_decreasing_boundaries_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"must not decrease, but is \[0, 3, 2\]"):
        split_points(torch.tensor([0, 3, 2]))
