# SPDX-License-Identifier: Apache-2.0
"""The tensor-core lowering run: integers exact, rounding within its bound, the same bits each time.

Needs a GPU. On one newer than Turing, kernels are lowered for sm_75 and assembled for that chip:
    python -m pytest -m gpu tests/kernels/triton/test_turing_mma_gpu.py
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from turing_kernels import batched, chained, matmul, mixed, of_ones

from vllm.pre_ampere.devices import emulated_devices
from vllm.pre_ampere.emulation import lower_for
from vllm.pre_ampere.kernels.triton import turing_mma, turing_ptx

pytestmark = pytest.mark.gpu

ACCUMULATORS = {"fp32": tl.float32, "fp16": tl.float16, "int32": tl.int32}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int32": torch.int32}


@pytest.fixture(autouse=True, scope="module")
def lowered_for_turing() -> Iterator[None]:
    if torch.cuda.get_device_capability() != (7, 5):
        (card,) = emulated_devices([(7, 5)], 1)
        lower_for(card)
    turing_mma.enable()
    yield
    turing_mma.disable()


def _multiply(
    a: Tensor,
    b: Tensor,
    accumulator: str,
    tile: tuple[int, int, int] = (64, 64, 32),
    num_warps: int = 4,
    transposed: tuple[bool, bool] = (False, False),
    from_registers: bool = False,
) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device="cuda", dtype=DTYPES[accumulator])
    grid = (-(-m // tile[0]), -(-n // tile[1]))
    kernel = matmul[grid](
        a.T.contiguous() if transposed[0] else a,
        b.T.contiguous() if transposed[1] else b,
        out, m, n, k,
        BM=tile[0], BN=tile[1], BK=tile[2], ACC=ACCUMULATORS[accumulator],
        TRANSPOSED_A=transposed[0], TRANSPOSED_B=transposed[1], FROM_REGISTERS=from_registers,
        num_warps=num_warps,
    )  # fmt: skip
    assert kernel.metadata.turing_mma == turing_mma.ON_TENSOR_CORES
    return out


def _integers(generator: np.random.Generator, *shape: int, limit: int, dtype: Any) -> Tensor:
    return torch.from_numpy(generator.integers(-limit, limit + 1, shape)).to("cuda", dtype)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    accumulator=st.sampled_from(list(ACCUMULATORS)),
    m=st.integers(1, 200),
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    tile=st.tuples(
        st.sampled_from([16, 32, 64, 128]),
        st.sampled_from([16, 32, 64, 128]),
        st.sampled_from([32, 64]),
    ),
    num_warps=st.sampled_from([1, 2, 4, 8]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    from_registers=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_product_of_integers_is_exact(
    accumulator: str,
    m: int,
    n: int,
    k: int,
    tile: tuple[int, int, int],
    num_warps: int,
    transposed: tuple[bool, bool],
    from_registers: bool,
    seed: int,
) -> None:
    """Sums below 2**11 are exact in fp16, below 2**24 in fp32: one wrong element cannot hide."""
    dtype = torch.int8 if accumulator == "int32" else torch.float16
    random = np.random.default_rng(seed)
    limit = {"fp16": 1, "fp32": 16, "int32": 63}[accumulator]
    a = _integers(random, m, k, limit=limit, dtype=dtype)
    b = _integers(random, k, n, limit=limit, dtype=dtype)
    out = _multiply(a, b, accumulator, tile, num_warps, transposed, from_registers)
    expected = a.double() @ b.double() * (2 if from_registers else 1)
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize(
    "tile", [(16, 16, 16), (16, 32, 16), (8, 64, 16), (64, 8, 32), (2, 16, 64)]
)
@pytest.mark.parametrize("num_warps", [1, 4])
def test_small_tiles_are_exact(tile: tuple[int, int, int], num_warps: int) -> None:
    random = np.random.default_rng(3)
    a = _integers(random, 37, 100, limit=8, dtype=torch.float16)
    b = _integers(random, 100, 41, limit=8, dtype=torch.float16)
    assert torch.equal(_multiply(a, b, "fp32", tile, num_warps).double(), a.double() @ b.double())


@pytest.mark.parametrize(("accumulator", "unit"), [("fp32", 2.0**-23), ("fp16", 2.0**-10)])
def test_rounding_stays_within_one_unit_a_step(accumulator: str, unit: float) -> None:
    """A step of the instruction adds 8 products to the accumulator; each may cost one unit."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    a = torch.randn(256, 512, device="cuda", generator=generator).half() / 8
    b = torch.randn(512, 192, device="cuda", generator=generator).half() / 8
    out = _multiply(a, b, accumulator)
    error = (out.double() - a.double() @ b.double()).abs()
    bound = (a.double().abs() @ b.double().abs()) * (512 / 8 + 1) * unit
    assert (error <= bound).all()
    assert error.max() > 0


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("block_m", "block_n", "head"), [(64, 32, 64), (16, 64, 128), (128, 64, 32)]
)
def test_chained_products_are_exact(num_warps: int, block_m: int, block_n: int, head: int) -> None:
    random = np.random.default_rng(11)
    size = 150
    q, k, v = (_integers(random, size, head, limit=1, dtype=torch.float16) for _ in range(3))
    out = torch.empty(size, head, device="cuda")
    grid = (-(-size // block_m),)
    kernel = chained[grid](q, k, v, out, size, BM=block_m, BN=block_n, D=head, num_warps=num_warps)
    assert kernel.metadata.turing_mma == turing_mma.ON_TENSOR_CORES
    assert torch.equal(out.double(), (q.double() @ k.double().T) @ v.double())


@pytest.mark.parametrize("num_warps", [1, 4])
def test_a_constant_may_be_operand_and_accumulator(num_warps: int) -> None:
    b = _integers(np.random.default_rng(23), 32, 32, limit=8, dtype=torch.float16)
    out = torch.empty(32, 32, device="cuda", dtype=torch.float16)
    kernel = of_ones[(1,)](b, out, N=32, num_warps=num_warps)
    assert kernel.metadata.turing_mma == turing_mma.ON_TENSOR_CORES
    assert torch.equal(out.double(), (1 + b.double().sum(0)).expand(32, 32))


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_a_batch_of_products_is_exact(num_warps: int) -> None:
    random = np.random.default_rng(13)
    a = _integers(random, 8, 32, 32, limit=8, dtype=torch.float16)
    b = _integers(random, 8, 32, 16, limit=8, dtype=torch.float16)
    out = torch.empty(8, 32, 16, device="cuda")
    kernel = batched[(1,)](a, b, out, G=8, M=32, N=16, K=32, num_warps=num_warps)
    assert kernel.metadata.turing_mma == turing_mma.ON_TENSOR_CORES
    assert torch.equal(out.double(), a.double() @ b.double())


@pytest.mark.parametrize("num_warps", [1, 4])
def test_an_fp32_product_beside_fp16_ones_is_exact(num_warps: int) -> None:
    random = np.random.default_rng(17)
    a = _integers(random, 32, 64, limit=3, dtype=torch.float16)
    b = _integers(random, 64, 16, limit=3, dtype=torch.float16)
    out = torch.empty(32, 16, device="cuda")
    kernel = mixed[(1,)](a, b, out, M=32, N=16, K=64, num_warps=num_warps)
    assert kernel.metadata.turing_mma == turing_mma.ON_TENSOR_CORES
    # Operands of the fp32 product reach 576, past what tf32 holds exactly with their sums.
    assert torch.equal(out.double(), (a.double() @ a.double().T) @ (a.double() @ b.double()))


def test_every_run_gives_the_same_bits() -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    a = torch.randn(300, 512, device="cuda", generator=generator).half()
    b = torch.randn(512, 260, device="cuda", generator=generator).half()
    first = _multiply(a, b, "fp32", num_warps=8)
    for _ in range(20):
        assert torch.equal(_multiply(a, b, "fp32", num_warps=8), first)


@pytest.mark.parametrize("accumulator", ["fp32", "fp16"])
def test_the_bits_are_those_of_tritons_own_turing_instructions(
    accumulator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton can still write m16n8k8 itself, from a layout of version 2.1 that no pass makes."""
    generator = torch.Generator(device="cuda").manual_seed(9)
    a = torch.randn(200, 384, device="cuda", generator=generator).half()
    b = torch.randn(384, 136, device="cuda", generator=generator).half()
    ours = _multiply(a, b, accumulator)
    make_ttgir = CUDABackend.make_ttgir

    def with_turings_layout(mod: Any, metadata: Any, opt: Any, capability: int) -> Any:
        made = str(make_ttgir(mod, metadata, opt, capability))
        assert "versionMajor = 2, versionMinor = 0" in made
        return turing_mma._parse(made.replace("versionMinor = 0", "versionMinor = 1"), mod.context)

    def count(ptx: str) -> tuple[str, int]:
        assert "m16n8k16" not in ptx
        return ptx, ptx.count("mma.sync.aligned.m16n8k8")

    monkeypatch.setattr(CUDABackend, "make_ttgir", staticmethod(with_turings_layout))
    monkeypatch.setattr(turing_ptx, "for_turing", count)
    monkeypatch.setattr(turing_mma, "_source_digest", lambda: "-tritons-own")
    matmul.device_caches.clear()
    try:
        assert torch.equal(_multiply(a, b, accumulator), ours)
    finally:
        matmul.device_caches.clear()


def test_a_template_of_inductor_meets_the_tensor_cores() -> None:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    settings_of_inductor = {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TRITON",
        "max_autotune_gemm_search_space": "DEFAULT",
        "use_static_cuda_launcher": False,
    }
    ways = []

    def listen(*, metadata: dict[str, Any], **_: Any) -> None:
        if "mm" in metadata["name"]:
            ways.append(metadata.get("turing_mma"))

    random = np.random.default_rng(19)
    a = _integers(random, 256, 512, limit=8, dtype=torch.float16)
    b = _integers(random, 512, 384, limit=8, dtype=torch.float16)
    knobs.compilation.listener = listen
    try:
        with fresh_cache(), config.patch(settings_of_inductor):
            out = torch.compile(lambda x, y: x @ y)(a, b)
    finally:
        knobs.compilation.listener = None
    assert torch.equal(out.double(), (a.double() @ b.double()).half().double())
    assert ways
    assert set(ways) == {turing_mma.ON_TENSOR_CORES}
