# SPDX-License-Identifier: Apache-2.0
"""Two of upstream's Triton kernels on a box without Triton: moving GDN states between blocks.

With prefix caching ("align" mode) a request's state moves to a new block at each block boundary. With
speculation upstream does that by Triton kernels (vllm/v1/worker/mamba_utils.py, 0.32.0), for which its
CPU platform registers no replacement, so that the first such step fails. The functions here have those
kernels' parameters and do the same copies with memmove; `register_triton_kernel_overrides` is the hook.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_INT32_BYTES = 4


@dataclass(frozen=True)
class StateLayout:
    """Where the states of all layers lie: one entry a state tensor, addresses and sizes in bytes.

    Attributes:
        block_tables: address of each group's table of int32 block numbers.
        block_table_stride: entries of a table for one request.
        base: address of the state's block 0.
        block_stride: from one block to the next.
        element_size: of one element.
        inner_size: elements of one token's row of a convolution state, or of a whole recurrent state.
        convolution_width: tokens that a convolution state holds; 0 for a recurrent state.
        group: which block table the state uses.
        row_count, row_stride: of a convolution state that holds its channels first.
        channels_first: whether convolution states do.
    """

    block_tables: list[int]
    block_table_stride: int
    base: list[int]
    block_stride: list[int]
    element_size: list[int]
    inner_size: list[int]
    convolution_width: list[int]
    group: list[int]
    row_count: list[int]
    row_stride: list[int]
    channels_first: bool

    def copy(self, request: int, source: int, destination: int, accepted_drafts: int) -> None:
        """Move every state of a request from one column of its block table to another.

        Args:
            request: row of the block table.
            source, destination: columns.
            accepted_drafts: how many drafts beyond the first token were accepted: a convolution
                state moves on by as many tokens, a recurrent state is taken from as many columns on.
        """
        for state in range(len(self.base)):
            if self.convolution_width[state] > 0:
                self._copy_convolution(state, request, source, destination, accepted_drafts)
            else:
                size = self.inner_size[state] * self.element_size[state]
                ctypes.memmove(
                    self._address(state, request, destination),
                    self._address(state, request, source + accepted_drafts),
                    size,
                )

    def _copy_convolution(
        self, state: int, request: int, source: int, destination: int, accepted_drafts: int
    ) -> None:
        read = self._address(state, request, source)
        write = self._address(state, request, destination)
        tokens = self.convolution_width[state] - accepted_drafts
        if not self.channels_first:
            token_size = self.inner_size[state] * self.element_size[state]
            ctypes.memmove(write, read + accepted_drafts * token_size, tokens * token_size)
            return
        shift = accepted_drafts * self.element_size[state]
        for row in range(self.row_count[state]):
            offset = row * self.row_stride[state]
            size = tokens * self.element_size[state]
            ctypes.memmove(write + offset, read + offset + shift, size)

    def _address(self, state: int, request: int, column: int) -> int:
        entry = request * self.block_table_stride + column
        table = self.block_tables[self.group[state]]
        block = ctypes.c_int32.from_address(table + entry * _INT32_BYTES).value
        return self.base[state] + block * self.block_stride[state]


def _layout(
    block_tables: Tensor, block_table_stride: int, states: tuple[Tensor, ...], channels_first: bool
) -> StateLayout:
    """The kernels' parameters as plain numbers; `states` in the order of StateLayout's fields."""
    columns: list[list[int]] = [tensor.tolist() for tensor in states]
    base, block_stride, element_size, inner_size, width, group, row_count, row_stride = columns
    return StateLayout(
        block_tables=block_tables.tolist(),
        block_table_stride=block_table_stride,
        base=base,
        block_stride=block_stride,
        element_size=element_size,
        inner_size=inner_size,
        convolution_width=width,
        group=group,
        row_count=row_count,
        row_stride=row_stride,
        channels_first=channels_first,
    )


def precopy_mamba_align_fused_kernel(
    mamba_state_idx: Tensor,
    src_col: Tensor,
    token_bias: Tensor,
    block_table_ptrs: Tensor,
    block_table_stride_req: int,
    state_base_addrs: Tensor,
    state_block_strides: Tensor,
    state_elem_sizes: Tensor,
    state_inner_sizes: Tensor,
    state_conv_widths: Tensor,
    state_group_indices: Tensor,
    state_dim_row_count: Tensor,
    state_dim_row_stride: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
    *,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = True,
    **tuning: Any,
) -> None:
    """Before a step: bring each request's state into the block that the step writes."""
    layout = _layout(
        block_table_ptrs,
        block_table_stride_req,
        (
            state_base_addrs,
            state_block_strides,
            state_elem_sizes,
            state_inner_sizes,
            state_conv_widths,
            state_group_indices,
            state_dim_row_count,
            state_dim_row_stride,
        ),
        CONV_STATE_DIM_FIRST,
    )
    for request in _requests(idx_mapping if HAS_IDX_MAPPING else None, num_reqs):
        source, destination = int(src_col[request]), int(mamba_state_idx[request])
        if source >= 0 and source != destination:
            layout.copy(request, source, destination, int(token_bias[request]))


def postprocess_mamba_fused_kernel(
    num_accepted_tokens: Tensor,
    mamba_state_idx: Tensor,
    num_scheduled_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_draft_tokens: Tensor,
    block_table_ptrs: Tensor,
    block_table_stride_req: int,
    state_base_addrs: Tensor,
    state_block_strides: Tensor,
    state_elem_sizes: Tensor,
    state_inner_sizes: Tensor,
    state_conv_widths: Tensor,
    state_group_indices: Tensor,
    state_dim_row_count: Tensor,
    state_dim_row_stride: Tensor,
    num_accepted_tokens_out: Tensor,
    idx_mapping: Tensor | None,
    num_reqs: int,
    *,
    block_size: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    **tuning: Any,
) -> None:
    """After a step: where a request passed a block boundary, keep the state as it was there."""
    layout = _layout(
        block_table_ptrs,
        block_table_stride_req,
        (
            state_base_addrs,
            state_block_strides,
            state_elem_sizes,
            state_inner_sizes,
            state_conv_widths,
            state_group_indices,
            state_dim_row_count,
            state_dim_row_stride,
        ),
        CONV_STATE_DIM_FIRST,
    )
    for request in _requests(idx_mapping if HAS_IDX_MAPPING else None, num_reqs):
        accepted = int(num_accepted_tokens[request])
        if PRECOMPUTED_NEW_COMPUTED:
            computed = int(num_computed_tokens[request])
            running = computed - accepted + 1
        else:
            running = int(
                num_computed_tokens[request]
                + num_scheduled_tokens[request]
                - num_draft_tokens[request]
            )
            computed = running + accepted - 1
        boundary = computed // block_size * block_size
        if boundary < running:
            continue
        source, destination = int(mamba_state_idx[request]), boundary // block_size - 1
        if source == destination:
            num_accepted_tokens_out[request] = 1
        if source != destination or boundary != running:
            layout.copy(request, source, destination, boundary - running)


def _requests(idx_mapping: Tensor | None, num_reqs: int) -> list[int]:
    if idx_mapping is None:
        return list(range(num_reqs))
    return [request for request in idx_mapping[:num_reqs].tolist() if request >= 0]


def register() -> None:
    """Put both in upstream's registry of replacements."""
    from vllm.triton_utils.dispatcher import register_kernels

    module = "vllm.v1.worker.mamba_utils"
    register_kernels(
        {
            f"{module}.{implementation.__name__}": implementation
            for implementation in (
                precopy_mamba_align_fused_kernel,
                postprocess_mamba_fused_kernel,
            )
        }
    )
