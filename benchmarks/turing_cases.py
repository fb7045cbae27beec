# SPDX-License-Identifier: Apache-2.0
"""The shapes that benchmarks/triton_turing.py measures, each with inputs and a float64 reference.

A case is made on the GPU from a fixed seed. Its reference is independent of the kernel: PyTorch's
products in float64, or the project's definition of the operation.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

# The head counts of Qwen3.5-4B on one card, and of Qwen3.5-27B on two.
GDN_HEADS = {"Hk/Hv 16/32": (16, 32), "Hk/Hv 8/24": (8, 24)}
HEAD_DIM = 128
# Attention of Qwen3.5-4B.
QUERY_HEADS, KV_HEADS, ATTENTION_DIM, PAGE = 16, 4, 256, 16
# Experts of Qwen3.5-35B-A3B.
EXPERTS, TOP_K, HIDDEN, EXPERT_WIDTH = 256, 8, 2048, 512
# Gate and up projection and output projection of Qwen3.5-27B on two cards.
LINEAR_SHAPES = ((17408, 5120), (5120, 3072))
OUT_FEATURES, IN_FEATURES = LINEAR_SHAPES[0]


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        name: what is computed.
        shape: of what size.
        run: launches it once and returns what it computed.
        reference: the same in float64; None where another case of the same kernel is compared.
        flops: floating-point operations of the tensor cores; 0 where a rate would say nothing.
        bytes: that have to be read and written; 0 where a rate would say nothing.
    """

    name: str
    shape: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor] | None = None
    flops: int = 0
    bytes: int = 0


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Euclidean norm of the difference over that of the reference."""
    return float((out.double() - reference).norm() / reference.norm())


@triton.jit
def _matmul_kernel(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    left = a + m[:, None] * K + k[None, :]
    right = b + k[:, None] * N + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(left), tl.load(right), acc)
        left += BK
        right += BK * N
    tl.store(c + m[:, None] * N + n[None, :], acc.to(tl.float16))


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator)


def products() -> list[Case]:
    """Square products, and the experts."""
    cases = []
    for size, tile, warps in ((2048, (64, 64, 32), 4), (4096, (128, 128, 32), 8)):
        a, b = (_random(size, size, seed=seed).half() for seed in (1, 2))
        out = torch.empty_like(a)

        def multiply(
            a: Tensor, b: Tensor, out: Tensor, tile: tuple[int, ...], warps: int
        ) -> Tensor:
            size = a.shape[0]
            _matmul_kernel[(size // tile[0], size // tile[1])](
                a, b, out, size, size, size, *tile, num_warps=warps
            )
            return out

        run = functools.partial(multiply, a, b, out, tile, warps)
        reference = functools.partial(lambda a, b: a.double() @ b.double(), a, b)
        shape = f"{size}x{size}x{size}, tile {tile[0]}x{tile[1]}x{tile[2]}, {warps} warps"
        cases.append(Case("fp16 matmul", shape, run, reference, 2 * size**3))
    return cases + [_experts(tokens) for tokens in (1, 64, 2048)]


def _experts(tokens: int) -> Case:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    hidden = _random(tokens, HIDDEN, seed=3).half()
    w1 = _random(EXPERTS, 2 * EXPERT_WIDTH, HIDDEN, seed=4).half() * HIDDEN**-0.5
    w2 = _random(EXPERTS, HIDDEN, EXPERT_WIDTH, seed=5).half() * EXPERT_WIDTH**-0.5
    weights, chosen = _random(tokens, EXPERTS, seed=6).softmax(-1).topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    chosen = chosen.to(torch.int32)

    def run() -> Tensor:
        return fused_experts(hidden, w1, w2, weights, chosen)

    def reference() -> Tensor:
        out = torch.zeros(tokens, HIDDEN, dtype=torch.float64, device="cuda")
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (hidden[token].double() @ w1[expert].double().T).chunk(2, -1)
            made = (torch.nn.functional.silu(gate) * up) @ w2[expert].double().T
            out.index_add_(0, token, made * weights[token, rank, None].double())
        return out

    flops = 2 * tokens * TOP_K * 3 * HIDDEN * EXPERT_WIDTH
    shape = f"{tokens} tokens, {EXPERTS} experts of {HIDDEN}x{EXPERT_WIDTH}, top {TOP_K}"
    return Case("fused experts", shape, run, reference, flops)


def linear() -> list[Case]:
    """One linear layer for several numbers of rows: cuBLAS, and what `VLLM_BATCH_INVARIANT=1` gives."""
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    from vllm.pre_ampere.kernels.triton import batch_invariant_linear, turing_mma

    batch_invariant_linear.use("sm75 tensor cores" if turing_mma.is_enabled() else "sm75")
    weight = _random(OUT_FEATURES, IN_FEATURES, seed=17).half()
    cases = []
    for rows in (1, 4, 16, 64, 2048):
        x = _random(rows, IN_FEATURES, seed=18).half()
        for name, function in (
            ("cuBLAS", torch.nn.functional.linear),
            ("batch-invariant, upstream's tile", linear_batch_invariant),
            ("batch-invariant, tiles by rows", batch_invariant_linear.call),
        ):
            cases.append(
                Case(
                    f"linear, {name}",
                    f"{rows} rows, {OUT_FEATURES}x{IN_FEATURES}",
                    functools.partial(function, x, weight),
                    functools.partial(lambda x, w: x.double() @ w.double().T, x, weight),
                    flops=2 * rows * OUT_FEATURES * IN_FEATURES,
                    bytes=2 * (weight.numel() + rows * (OUT_FEATURES + IN_FEATURES)),
                )
            )
    return cases


@dataclass(frozen=True)
class GdnInputs:
    """What a GDN layer's prefill takes, for one prompt: [1, T, heads, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    starts: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor


def gdn_inputs(key_heads: int, value_heads: int, tokens: int) -> GdnInputs:
    """Normalised keys and queries, decays and betas as a trained layer has them."""
    q, k = (
        torch.nn.functional.normalize(
            _random(1, tokens, key_heads, HEAD_DIM, seed=s), dim=-1
        ).half()
        for s in (7, 8)
    )
    chunks = -(-tokens // 64)
    indices = torch.stack([torch.zeros(chunks), torch.arange(chunks)], 1)
    return GdnInputs(
        q=q,
        k=k,
        v=_random(1, tokens, value_heads, HEAD_DIM, seed=9).half(),
        g=-torch.nn.functional.softplus(_random(1, tokens, value_heads, seed=10)) / 8,
        beta=_random(1, tokens, value_heads, seed=11).sigmoid(),
        state=_random(1, value_heads, HEAD_DIM, HEAD_DIM, seed=12) / 16,
        starts=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        chunk_indices=indices.to("cuda", torch.int32),
        chunk_offsets=torch.tensor([0, chunks], dtype=torch.int32, device="cuda"),
    )


def gdn() -> list[Case]:
    """The whole prefill of a GDN layer, with upstream's key products and with ours."""
    from vllm.third_party.flash_linear_attention.ops import chunk, chunk_scaled_dot_kkt

    from vllm.pre_ampere.kernels.reference.chunk import chunk_gated_delta_rule as definition
    from vllm.pre_ampere.kernels.triton import chunk_scaled_dot_kkt as ours

    upstream = chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd
    key_products = {"": upstream, ", our key products": ours.chunk_scaled_dot_kkt_fwd}

    def run(x: GdnInputs, function: Callable[..., Tensor]) -> Tensor:
        chunk.chunk_scaled_dot_kkt_fwd = function
        try:
            out, _ = chunk.chunk_gated_delta_rule(
                q=x.q,
                k=x.k,
                v=x.v,
                g=x.g,
                beta=x.beta,
                initial_state=x.state,
                output_final_state=True,
                cu_seqlens=x.starts,
                chunk_indices=x.chunk_indices,
                chunk_offsets=x.chunk_offsets,
            )
        finally:
            chunk.chunk_scaled_dot_kkt_fwd = upstream
        return out[0]

    def reference(x: GdnInputs) -> Tensor:
        out, _ = definition(x.q[0], x.k[0], x.v[0], x.g[0], x.beta[0], x.state, x.starts)
        return out

    cases = []
    for heads, (key_heads, value_heads) in GDN_HEADS.items():
        for tokens in (512, 2048, 8192):
            x = gdn_inputs(key_heads, value_heads, tokens)
            for suffix, function in key_products.items():
                cases.append(
                    Case(
                        f"GDN prefill{suffix}",
                        f"{heads}, T={tokens}",
                        functools.partial(run, x, function),
                        functools.partial(reference, x),
                    )
                )
    x = gdn_inputs(16, 32, 8192)
    for name, function in (("upstream", upstream), ("ours", ours.chunk_scaled_dot_kkt_fwd)):
        cases.append(
            Case(
                f"key products, {name}",
                "Hk/Hv 16/32, T=8192",
                functools.partial(
                    function, x.k, _chunk_sums(x.g), x.beta, x.starts, x.chunk_indices
                ),
                functools.partial(_key_products, x),
            )
        )
    return cases


def _chunk_sums(g: Tensor) -> Tensor:
    return g.unflatten(1, (-1, 64)).cumsum(2).flatten(1, 2)


def _key_products(x: GdnInputs) -> Tensor:
    group = x.beta.shape[-1] // x.k.shape[2]
    keys = x.k[0].double().unflatten(0, (-1, 64)).repeat_interleave(group, 2).transpose(1, 2)
    decay = _chunk_sums(x.g)[0].double().unflatten(0, (-1, 64)).transpose(1, 2)
    beta = x.beta[0].double().unflatten(0, (-1, 64)).transpose(1, 2)
    scale = (decay[..., :, None] - decay[..., None, :]).exp() * beta[..., None]
    made = (keys @ keys.mT * scale).tril(-1)
    return made.transpose(1, 2).flatten(0, 1)[None]


def gdn_kernels(x: GdnInputs) -> dict[str, Callable[[], object]]:
    """Each of upstream's kernels in that prefill by itself, by its name in the launch table."""
    from vllm.third_party.flash_linear_attention.ops import (
        chunk_delta_h,
        chunk_o,
        chunk_scaled_dot_kkt,
        cumsum,
        solve_tril,
        wy_fast,
    )

    ragged = {"cu_seqlens": x.starts, "chunk_indices": x.chunk_indices}
    bind = functools.partial
    sums = bind(cumsum.chunk_local_cumsum, x.g, chunk_size=64, **ragged)
    g = sums()
    products = bind(chunk_scaled_dot_kkt.chunk_scaled_dot_kkt_fwd, x.k, g, x.beta, **ragged)
    invert = bind(solve_tril.solve_tril, A=products(), output_dtype=torch.float16, **ragged)
    weigh = bind(
        wy_fast.recompute_w_u_fwd,
        k=x.k,
        v=x.v,
        beta=x.beta,
        A=invert(),
        g_cumsum=g,
        **ragged,
    )
    w, u = weigh()
    recur = bind(
        chunk_delta_h.chunk_gated_delta_rule_fwd_h,
        k=x.k,
        w=w,
        u=u,
        g=g,
        initial_state=x.state,
        output_final_state=True,
        chunk_offsets=x.chunk_offsets,
        **ragged,
    )
    h, new, _ = recur()
    read_out = bind(
        chunk_o.chunk_fwd_o, q=x.q, k=x.k, v=new, h=h, g=g, scale=HEAD_DIM**-0.5, **ragged
    )
    return {
        "chunk_local_cumsum": sums,
        "chunk_scaled_dot_kkt": products,
        "solve_tril": invert,
        "recompute_w_u": weigh,
        "chunk_delta_h": recur,
        "chunk_o": read_out,
    }


def attention() -> list[Case]:
    """TRITON_ATTN at D=256: prefill in two launches, one decoded token, and four verified ones."""
    from vllm.pre_ampere.kernels.triton import turing_mma
    from vllm.pre_ampere.kernels.triton.unified_attention_launch import PROMPTS

    cases = [_attend("attention, prefill", tokens, tokens) for tokens in (2048, 8192)]
    if turing_mma.is_enabled():
        for tokens in (2048, 8192):
            plain = _attend("attention, wide prefill", tokens, tokens)
            launch = (PROMPTS.rows, PROMPTS.keys, PROMPTS.num_warps)
            cases.append(replace(plain, run=functools.partial(attention_launched, plain, *launch)))
    cases.append(_attend("attention, decode", 1, 8192))
    cases.append(_attend("attention, verify", 4, 8192))
    return cases


def _attend(name: str, queries: int, context: int) -> Case:
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    pages = context // PAGE
    keys, values = (
        _random(pages, PAGE, KV_HEADS, ATTENTION_DIM, seed=seed).half() for seed in (13, 14)
    )
    query = _random(queries, QUERY_HEADS, ATTENTION_DIM, seed=15).half()
    out = torch.empty_like(query)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(16))
    table = table.to("cuda", torch.int32)[None]
    threshold = triton_attn.MIN_LAUNCH_GRID_SIZE_2D // KV_HEADS
    segments = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    scratch = torch.empty(threshold, QUERY_HEADS, segments, ATTENTION_DIM, device="cuda")
    largest, sums = (torch.empty(threshold, QUERY_HEADS, segments, device="cuda") for _ in "ms")
    one = torch.ones(1, KV_HEADS, device="cuda")
    starts = torch.tensor([0, queries], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([context], dtype=torch.int32, device="cuda")

    def run() -> Tensor:
        unified_attention(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=queries,
            seqused_k=lengths,
            max_seqlen_k=context,
            softmax_scale=ATTENTION_DIM**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=segments,
            softmax_segm_output=scratch,
            softmax_segm_max=largest,
            softmax_segm_expsum=sums,
        )
        return out

    def reference() -> Tensor:
        order = table[0].long()
        k, v = (cache[order].flatten(0, 1).double() for cache in (keys, values))
        made = torch.empty(queries, QUERY_HEADS, ATTENTION_DIM, dtype=torch.float64, device="cuda")
        position = torch.arange(context - queries, context, device="cuda")[:, None]
        later = torch.arange(context, device="cuda")[None] > position
        for head in range(QUERY_HEADS):
            shared = head * KV_HEADS // QUERY_HEADS
            scores = query[:, head].double() @ k[:, shared].T * ATTENTION_DIM**-0.5
            made[:, head] = scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, shared]
        return made

    flops = 4 * QUERY_HEADS * ATTENTION_DIM * (queries * context - queries * (queries - 1) // 2)
    return Case(name, f"{queries} tokens at context {context}, D=256", run, reference, flops)


# Rows of queries times heads, keys in a tile, and warps of a block of paged attention: those that
# fit a block of Turing. The first is upstream's.
ATTENTION_LAUNCHES = (
    *((16, 32, 4), (16, 32, 2), (32, 16, 4), (32, 32, 4), (32, 32, 8)),
    *((64, 16, 8), (64, 32, 4), (64, 32, 8)),
)


def attention_launched(case: Case, rows: int, keys: int, num_warps: int) -> Tensor:
    """Run a case of attention in this launch, as the product has a prompt's launched."""
    from vllm.v1.attention.ops import triton_unified_attention

    from vllm.pre_ampere.kernels.triton.unified_attention_launch import (
        AttentionLaunch,
        WideAttention,
    )

    kernel = triton_unified_attention.kernel_unified_attention
    launch = AttentionLaunch(rows, keys, num_warps)
    triton_unified_attention.kernel_unified_attention = WideAttention(kernel, launch)
    try:
        return case.run()
    finally:
        triton_unified_attention.kernel_unified_attention = kernel


# Tiles of batch-invariant linear layers, by rows of the product, as (rows, columns, block_k, warps,
# blocks a multiprocessor).
LINEAR_TILES = {
    1: (
        *((16, 16, 64, 1, 16), (16, 16, 128, 1, 16), (16, 32, 64, 1, 16), (16, 32, 64, 2, 16)),
        *((16, 32, 128, 2, 16), (16, 32, 128, 4, 8), (16, 32, 256, 4, 8), (16, 64, 64, 2, 16)),
        *((16, 64, 64, 4, 8), (16, 64, 128, 4, 8), (16, 64, 256, 4, 8), (16, 128, 64, 4, 8)),
    ),
    64: (
        *((64, 16, 64, 2, 8), (64, 32, 64, 2, 8), (64, 32, 64, 4, 8), (64, 64, 32, 4, 4)),
        *((64, 64, 64, 4, 4), (64, 64, 64, 8, 4), (64, 128, 64, 8, 2)),
    ),
    2048: (
        *((64, 64, 64, 4, 4), (64, 128, 32, 4, 2), (128, 64, 64, 4, 2), (128, 64, 32, 4, 3)),
        *((128, 128, 32, 8, 1), (128, 128, 64, 8, 1), (128, 128, 64, 8, 2), (128, 128, 32, 4, 1)),
    ),
}


def linear_launched(
    rows: int, features: tuple[int, int], tile: tuple[int, ...]
) -> Callable[[], Tensor]:
    """One linear layer in the tile."""
    from vllm.pre_ampere.kernels.triton import batch_invariant_linear

    x, weight = _random(rows, features[1], seed=18).half(), _random(*features, seed=17).half()
    out = x.new_empty(rows, features[0])
    chosen = batch_invariant_linear.Tile(*tile)

    def run() -> Tensor:
        batch_invariant_linear.launch(x, weight, None, out, chosen)
        return out

    return run


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "products": products,
    "linear": linear,
    "gdn": gdn,
    "attention": attention,
}
