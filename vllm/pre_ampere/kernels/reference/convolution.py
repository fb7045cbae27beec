# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution in front of the delta rule, with its rolling state.

The state conventions are those of `causal_conv1d_fn` and `causal_conv1d_update` in vLLM 0.32
(model_executor/layers/mamba/ops/causal_conv1d.py): the last width - 1 inputs stand, oldest first,
in columns 0 to width - 2 of a slot. A slot may be longer than that. Speculative decoding uses the
rest: after a step that verified m tokens, columns 0 to width - 3 + m hold the width - 2 inputs
before them and then the m tokens themselves. If a of them are accepted, the window of the next step
starts at column a - 1.
"""

import torch
from torch import Tensor

from vllm.pre_ampere.kernels.reference.ragged import split_points, token_coordinates

# Tokens convolved at a time, so that the float64 copies stay in the cache.
_BLOCK = 256


def causal_conv1d_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """Convolve whole prompts, or pieces of them.

    Args:
        x: [num_tokens, dim], the requests' tokens one after the other.
        weight: [dim, width]; the last column meets the current token.
        bias: [dim], or None.
        activation: "silu" or None.
        conv_states: [num_slots, dim, state_length >= width - 1], columns 0 to width - 2 of the used
            slots are updated in place.
        query_start_loc: [n + 1], integers.
        slots: [n], integers; 0 and below are skipped.
        has_initial_state: [n], bool; where false the convolution starts from zeros.

    Returns:
        [num_tokens, dim] in x's dtype; zero where no request was computed.

    Raises:
        ValueError: an unknown activation, or a state shorter than width - 1.
    """
    history_length = _history_length(weight, conv_states)
    starts, lengths = split_points(query_start_loc)
    active = ((slots > 0) & (lengths > 0)).nonzero().squeeze(1)
    rows, starts, lengths = slots[active].long(), starts[active], lengths[active]

    history = conv_states[rows, :, :history_length]
    history = history.masked_fill(~has_initial_state.bool()[active, None, None], 0)
    out, inputs, first = _convolve(x, weight, bias, activation, history, starts, lengths)
    conv_states[rows, :, :history_length] = _window(inputs, first + lengths, history_length)
    return out


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    slots: Tensor,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Tensor:
    """Convolve the tokens of a decode step, or the drafted tokens of a speculative one.

    Args:
        x: [num_tokens, dim]; without query_start_loc one token a request.
        weight: [dim, width].
        bias: [dim], or None.
        activation: "silu" or None.
        conv_states: [num_slots, dim, state_length], updated in place. Without num_accepted_tokens
            the window moves on by all tokens given; with it the slot is laid out as the module
            says, and state_length must be at least width - 2 + the longest request.
        slots: [n], integers; 0 and below are skipped.
        query_start_loc: [n + 1], integers, or None for one token a request.
        num_accepted_tokens: [n], how many tokens of the request's previous step were accepted (at
            least 1), or None where nothing is speculated.

    Returns:
        [num_tokens, dim] in x's dtype; zero where no request was computed.

    Raises:
        ValueError: an unknown activation, or a state too short.
    """
    history_length = _history_length(weight, conv_states)
    if query_start_loc is None:
        query_start_loc = torch.arange(len(slots) + 1, device=slots.device)
    starts, lengths = split_points(query_start_loc)
    active = ((slots > 0) & (lengths > 0)).nonzero().squeeze(1)
    rows, starts, lengths = slots[active].long(), starts[active], lengths[active]

    state = conv_states[rows]
    if num_accepted_tokens is None:
        history = state[..., :history_length]
    else:
        columns = torch.arange(history_length, device=x.device)
        columns = columns + (num_accepted_tokens[active].long() - 1)[:, None]
        history = state.gather(2, columns[:, None, :].expand(-1, x.shape[1], -1))
    out, inputs, first = _convolve(x, weight, bias, activation, history, starts, lengths)

    if num_accepted_tokens is None:
        conv_states[rows, :, :history_length] = _window(inputs, first + lengths, history_length)
        return out
    kept = history_length - 1 + lengths
    longest = int(kept.max()) if len(kept) else 0
    if longest > conv_states.shape[2]:
        raise ValueError(
            f"a request of {longest - history_length + 1} tokens needs a convolution state of "
            f"{longest} columns, but it has {conv_states.shape[2]}: allocate width - 1 and one for "
            "each speculative token"
        )
    request, column = token_coordinates(kept)
    conv_states[rows[request], :, column] = inputs[first[request] + 1 + column]
    return out


def _history_length(weight: Tensor, conv_states: Tensor) -> int:
    width = weight.shape[1]
    if conv_states.shape[2] < width - 1:
        raise ValueError(
            f"a convolution of width {width} keeps {width - 1} inputs, but conv_states has "
            f"{conv_states.shape[2]} columns"
        )
    return width - 1


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    history: Tensor,
    starts: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Put each request's history in front of its tokens and convolve.

    Args:
        history: [n, dim, width - 1], the inputs before each request's first token.

    Returns:
        (out, inputs, first): out [num_tokens, dim] in x's dtype; inputs, in the state's dtype, each
        request's history and then its tokens, one a row; first [n], the row where each request's
        history starts.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, not {activation!r}")
    width = weight.shape[1]
    request, position = token_coordinates(lengths)
    source = starts[request] + position
    padded = lengths + width - 1
    first = padded.cumsum(0) - padded

    # A later step reads the tokens back from the state, so this step takes them as stored there.
    inputs = torch.empty(int(padded.sum()), x.shape[1], dtype=history.dtype, device=x.device)
    history_rows = first[:, None] + torch.arange(width - 1, device=x.device)
    inputs[history_rows.flatten()] = history.transpose(1, 2).reshape(-1, x.shape[1])
    window = first[request] + position
    inputs[window + width - 1] = x[source].to(history.dtype)

    out = torch.zeros_like(x)
    taps = weight.double().unbind(1)
    for rows, target in zip(torch.split(window, _BLOCK), torch.split(source, _BLOCK), strict=True):
        total = torch.zeros(len(rows), x.shape[1], dtype=torch.float64, device=x.device)
        if bias is not None:
            total += bias.double()
        for tap, column in enumerate(taps):
            total += inputs[rows + tap].double() * column
        if activation == "silu":
            total *= torch.sigmoid(total)
        out[target] = total.to(x.dtype)
    return out, inputs, first


def _window(inputs: Tensor, first: Tensor, length: int) -> Tensor:
    """Rows first to first + length - 1 of inputs for each request, as [n, dim, length]."""
    rows = first[:, None] + torch.arange(length, device=inputs.device)
    return inputs[rows].transpose(1, 2)
