# SPDX-License-Identifier: Apache-2.0
"""Requests of different lengths, laid out one after the other in one tensor of tokens."""

import torch
from torch import Tensor


def split_points(query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    """The first token and the number of tokens of each request.

    Args:
        query_start_loc: [n + 1], not decreasing: request i owns the tokens from entry i to i + 1.

    Returns:
        (starts, lengths), int64 [n].

    Raises:
        ValueError: the entries decrease somewhere.
    """
    boundaries = query_start_loc.to(torch.int64)
    starts, lengths = boundaries[:-1], boundaries.diff()
    if bool((lengths < 0).any()):
        raise ValueError(f"query_start_loc must not decrease, but is {boundaries.tolist()}")
    return starts, lengths


def token_coordinates(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, in order: which request it belongs to, and its position there.

    Args:
        lengths: [n], tokens of each request.

    Returns:
        (request, position), int64 [sum(lengths)].
    """
    requests = torch.arange(len(lengths), device=lengths.device)
    request = torch.repeat_interleave(requests, lengths)
    first = lengths.cumsum(0) - lengths
    position = torch.arange(len(request), device=lengths.device) - first[request]
    return request, position
