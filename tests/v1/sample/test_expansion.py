# SPDX-License-Identifier: Apache-2.0
"""Each draft token is sampled with its own request's parameters, on a CPU as in upstream's kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.pre_ampere.platform.expansion import expand_kernel


@given(
    requests=st.lists(
        st.tuples(st.floats(0, 4, width=32), st.integers(0, 9)), min_size=1, max_size=12
    ),
    replace_to=st.sampled_from([0.0, 1.0]),
)
def test_every_token_has_its_requests_value(
    requests: list[tuple[float, int]], replace_to: float
) -> None:
    values = torch.tensor([value for value, _ in requests])
    counts = torch.tensor([count for _, count in requests])
    output = torch.full((int(counts.sum()) + 2,), torch.nan)
    expand_kernel(output, values, counts.cumsum(0).int(), 0.0, replace_to)
    expected = [replace_to if v == 0 else v for v, count in requests for _ in range(count)]
    assert output[:-2].tolist() == torch.tensor(expected).tolist()
    assert output[-2:].isnan().all(), "nothing is written past the last token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    """Upstream's replacement casts to int64: a temperature of 0.7 would be 0."""
    output = torch.zeros(3, dtype=dtype)
    expand_kernel(output, torch.tensor([5, 0], dtype=dtype), torch.tensor([2, 3]), 0, 1)
    assert output.dtype == dtype
    assert output.tolist() == [5, 5, 1]
