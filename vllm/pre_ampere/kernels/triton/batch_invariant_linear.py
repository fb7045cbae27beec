# SPDX-License-Identifier: Apache-2.0
"""Unquantised linear layers in which no row of the output depends on how many rows there are.

cuBLAS chooses a kernel, and with it the order of a sum, by the number of rows: a token verified among
drafts can so come out otherwise than the same token decoded alone. `VLLM_BATCH_INVARIANT=1` is
upstream's switch for those who want the same bits; it puts a Triton kernel in place of cuBLAS
(`matmul_kernel_persistent` of vllm/model_executor/determinism/batch_invariant.py, 0.32.0), for float16
in tiles of 128 rows whatever the batch. The same kernel is launched here in tiles that suit the rows
of a step: a decoded token would otherwise be multiplied 127 times for nothing.

A sum runs over the columns of x in ascending order in whichever tile it stands, as many at a time as
the instruction takes, so the tile changes no bit. The operator is opaque to the compiler, for a
compiled graph serves batches of every size and would keep the tile of the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
from vllm.model_executor.determinism.batch_invariant import matmul_kernel_persistent
from vllm.utils.platform_utils import num_compute_units
from vllm.utils.torch_utils import direct_register_custom_op

from vllm.pre_ampere.kernels.triton.launch_configurations import Lowering

_LARGE = 2**31


@dataclass(frozen=True)
class Tile:
    """How products of up to some number of rows are launched.

    Attributes:
        rows: of the output in a tile.
        columns: of the output in a tile.
        block_k: columns of x that are loaded at a time.
        num_warps: warps a block.
        blocks_per_multiprocessor: what the persistent grid is limited to. These cards have no
            asynchronous copies, so only other blocks hide a block's loads.
    """

    rows: int
    columns: int
    block_k: int
    num_warps: int
    blocks_per_multiprocessor: int


# On the tensor cores the fastest of benchmarks/results/triton_turing.json. Of scalar code, wider tiles
# or blocks of 64 columns spill 224 bytes to 10 KB a thread on either card.
_SCALAR = (Tile(16, 64, 32, 4, 4), Tile(64, 64, 32, 8, 2))
TABLE: Mapping[Lowering, tuple[Tile, ...]] = {
    "sm75 tensor cores": (
        Tile(16, 32, 256, 4, 8),
        Tile(64, 32, 64, 2, 8),
        Tile(128, 64, 64, 4, 2),
    ),
    "sm75": _SCALAR,
    "sm70": _SCALAR,
}
"""By way of compiling, in the order of their rows; the last serves all larger products, too."""

_tiles: tuple[Tile, ...] = _SCALAR


def tile_for(rows: int, tiles: Sequence[Tile]) -> Tile:
    """The smallest that holds so many rows, or the last."""
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])


def use(lowering: Lowering) -> None:
    """Launch as it suits this process's card, and put the operator in upstream's library.

    Args:
        lowering: how the card's matrix products are compiled.
    """
    global _tiles
    _tiles = TABLE[lowering]
    if getattr(torch.ops.vllm, "batch_invariant_linear", None) is None:
        direct_register_custom_op(
            op_name="batch_invariant_linear",
            op_func=batch_invariant_linear,
            mutates_args=[],
            fake_impl=_shape_only,
        )


def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`batch_invariant_linear` through its operator, with upstream's interface."""
    out: torch.Tensor = torch.ops.vllm.batch_invariant_linear(x, weight, bias)
    return out


def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ weight.T + bias`, summed in float32 in ascending order of the columns of x.

    Args:
        x: [..., in_features], of any floating type.
        weight: [out_features, in_features], of the same type.
        bias: [out_features] or what broadcasts to it, or None.

    Returns:
        [..., out_features], of the type of x.

    Raises:
        ValueError: the two have other numbers of columns, or other types.
    """
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"a linear layer of {weight.shape[1]} columns of {weight.dtype} cannot take {x.shape[-1]} "
            f"columns of {x.dtype}"
        )
    if bias is not None:
        bias = bias.expand(weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(rows.shape[0], weight.shape[0])
    if out.numel() > 0:
        launch(rows, weight, bias, out, tile_for(rows.shape[0], _tiles))
    return out.reshape(*x.shape[:-1], weight.shape[0])


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch upstream's kernel once; x and out have two dimensions."""
    tiles = triton.cdiv(out.shape[0], tile.rows) * triton.cdiv(out.shape[1], tile.columns)
    most = num_compute_units(x.device.index) * tile.blocks_per_multiprocessor
    matmul_kernel_persistent[(min(tiles, most),)](
        x,
        weight,
        out,
        bias,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        x.stride(0),
        x.stride(1),
        weight.stride(1),
        weight.stride(0),
        out.stride(0),
        out.stride(1),
        1 if bias is None else bias.stride(0),
        BLOCK_SIZE_M=tile.rows,
        BLOCK_SIZE_N=tile.columns,
        BLOCK_SIZE_K=tile.block_k,
        GROUP_SIZE_M=8,
        NUM_SMS=most,
        A_LARGE=x.numel() > _LARGE,
        B_LARGE=weight.numel() > _LARGE,
        C_LARGE=out.numel() > _LARGE,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=1,
    )


def _shape_only(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
