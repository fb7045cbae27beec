# SPDX-License-Identifier: Apache-2.0
"""The tensor-core lowering, compiled for sm_75 without a GPU: what it takes, and what it leaves."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget, Language
from triton.backends.nvidia.compiler import CUDABackend
from turing_kernels import (
    TURING,
    batched,
    block,
    chained,
    compile_block,
    compile_for_turing,
    compile_matmul,
    mixed,
    of_ones,
)

from vllm.pre_ampere.kernels.triton import turing_mma, turing_ptx

HMMA = "HMMA.1688.F32"


@pytest.fixture(autouse=True)
def own_triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


@pytest.fixture
def enabled() -> Iterator[None]:
    turing_mma._log_refusal.cache_clear()
    assert turing_mma.enable()
    yield
    turing_mma.disable()


def test_stock_triton_has_no_tensor_core_instruction_for_turing() -> None:
    compiled = compile_matmul()
    assert (compiled.way, compiled.tensor_core) == (None, {})
    assert compiled.fma > 1000


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("options", "instruction", "instructions"),
    [
        # Each warp of four has 64*64/4 results of 32 k: 2*4 tiles of 16x8, 4 steps of 8 in k.
        ({}, HMMA, 32),
        ({"num_warps": 1}, HMMA, 128),
        ({"num_warps": 8}, HMMA, 16),
        ({"accumulator": tl.float16}, "HMMA.1688.F16", 32),
        ({"dtype": "i8", "accumulator": tl.int32}, "IMMA.8816.S8.S8", 32),
        ({"transposed": (True, False)}, HMMA, 32),
        ({"transposed": (False, True)}, HMMA, 32),
        ({"transposed": (True, True), "num_warps": 2}, HMMA, 64),
        ({"from_registers": True}, HMMA, 32),
        ({"tile": (16, 16, 16), "num_warps": 1}, HMMA, 4),
        ({"tile": (128, 128, 32), "num_warps": 8}, HMMA, 64),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_products_are_tensor_core_instructions(
    options: dict[str, Any], instruction: str, instructions: int
) -> None:
    compiled = compile_matmul(**options)
    assert compiled.way == turing_mma.ON_TENSOR_CORES
    assert compiled.tensor_core == {instruction: instructions}
    assert compiled.fma < 40
    assert compiled.stack == 0
    assert turing_ptx.first_beyond_turing(compiled.ptx) is None


@pytest.mark.usefixtures("enabled")
def test_chained_products_both_use_tensor_cores() -> None:
    operands = {"q": "fp16", "k": "fp16", "v": "fp16", "o": "fp32"}
    compiled = compile_for_turing(chained, operands, ("S",), BM=64, BN=32, D=64)
    # A warp: 16 of the 64 rows. q @ k.T is 1 x 4 tiles in 8 steps, (q @ k.T) @ v 1 x 8 in 4.
    assert compiled.tensor_core == {HMMA: 32 + 32}


@pytest.mark.usefixtures("enabled")
def test_a_three_dimensional_product_uses_tensor_cores() -> None:
    operands = {"a": "fp16", "b": "fp16", "c": "fp32"}
    compiled = compile_for_turing(batched, operands, G=8, M=32, N=16, K=32)
    # 8 products of 2 x 2 tiles in 4 steps over 4 warps.
    assert compiled.tensor_core == {HMMA: 32}


def _overwritten_operands(ptx: str) -> set[str]:
    """Registers that an instruction reads as operands after the one before has written them."""
    lists = [re.findall(r"\{(.*?)\}", line) for line in re.findall(r"mma\.sync.*", ptx)]
    pairs = [[set(part.replace(" ", "").split(",")) for part in one] for one in lists]
    return {
        register
        for first, second in zip(pairs[::2], pairs[1::2], strict=True)
        for register in first[0] & (second[1] | second[2])
    }


def test_no_operand_is_overwritten_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is in the two instructions that Triton itself would write for Turing, for constants."""
    operands = {"b": "fp16", "c": "fp16"}
    turing_mma.enable()
    try:
        ours = compile_for_turing(of_ones, operands, num_warps=1, N=16)
        make_ttgir = CUDABackend.make_ttgir

        def with_turings_layout(mod: Any, metadata: Any, opt: Any, capability: int) -> Any:
            made = str(make_ttgir(mod, metadata, opt, capability))
            turings = made.replace("versionMinor = 0", "versionMinor = 1")
            return turing_mma._parse(turings, mod.context)

        monkeypatch.setattr(CUDABackend, "make_ttgir", staticmethod(with_turings_layout))
        monkeypatch.setattr(turing_ptx, "for_turing", lambda ptx: (ptx, 1))
        monkeypatch.setattr(turing_mma, "_source_digest", lambda: "-tritons-own")
        tritons = compile_for_turing(of_ones, operands, num_warps=1, N=16)
    finally:
        turing_mma.disable()
    assert ours.ptx.count("mma.sync") == tritons.ptx.count("mma.sync") == 4
    assert _overwritten_operands(ours.ptx) == set()
    assert _overwritten_operands(tritons.ptx) != set()


@pytest.mark.usefixtures("enabled")
def test_an_fp32_product_beside_fp16_ones_stays_exact() -> None:
    operands = {"a": "fp16", "b": "fp16", "c": "fp32"}
    compiled = compile_for_turing(mixed, operands, num_warps=1, M=32, N=32, K=32)
    # Two products of 2 x 4 tiles in 4 steps; 32*32*32 multiplications over 32 lanes.
    assert compiled.tensor_core == {HMMA: 64}
    assert compiled.fma >= 1024
    assert "tf32" not in compiled.ptx


@pytest.mark.usefixtures("enabled")
def test_fp32_products_alone_are_left_to_triton_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = compile_block("fp32")
    assert compiled.way == turing_mma.NOTHING_TO_GAIN
    assert not caplog.records


@pytest.mark.parametrize("dtype", ["bf16", "fp8e5"])
def test_what_turing_cannot_multiply_is_compiled_as_stock_with_one_log_line(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    stock = compile_block(dtype)
    turing_mma._log_refusal.cache_clear()
    turing_mma.enable()
    try:
        with caplog.at_level(logging.WARNING):
            compiled = compile_block(dtype)
            compile_block(dtype, num_warps=2)
    finally:
        turing_mma.disable()
    assert compiled.ptx == stock.ptx
    assert compiled.way is not None
    assert compiled.way.startswith("refused: it multiplies ")
    assert len(caplog.records) == 1
    assert "Triton kernel block keeps Triton's own lowering" in caplog.text


@pytest.mark.usefixtures("enabled")
def test_a_tile_that_does_not_fit_shared_memory_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert turing_mma._SHARED_MEMORY == 65536
    monkeypatch.setattr(turing_mma, "_SHARED_MEMORY", 2048)
    compiled = compile_block()
    assert compiled.way == (
        "refused: it would need 4096 bytes of shared memory on the tensor cores, and a block has "
        "2048; a smaller tile would do"
    )
    assert compiled.tensor_core == {}


def test_a_failure_of_the_assembler_is_answered_by_the_stock_path(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stock = compile_block()
    rewrite = turing_ptx.for_turing
    monkeypatch.setattr(
        turing_ptx, "for_turing", lambda ptx: (rewrite(ptx)[0].replace("m16n8k8", "m16n8k7"), 32)
    )
    turing_mma.enable()
    try:
        compiled = compile_block()
    finally:
        turing_mma.disable()
    assert compiled.ptx == stock.ptx
    assert compiled.way is not None
    assert compiled.way.startswith("refused: compiling it for the tensor cores failed: ")


def test_other_cards_are_untouched() -> None:
    target = GPUTarget("cuda", 80, 32)
    stock = compile_block(target=target)
    turing_mma.enable()
    try:
        compiled = compile_block(target=target)
    finally:
        turing_mma.disable()
    assert (compiled.ptx, compiled.way) == (stock.ptx, None)


def test_a_turing_card_without_tensor_cores_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = ["NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce GTX 1660 Ti"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    current = 1

    class Driver:
        def get_current_device(self) -> int:
            return current

    monkeypatch.setattr(turing_mma.triton.runtime.driver, "_active", Driver())
    turing_mma._devices_without_tensor_cores.cache_clear()
    turing_mma.enable()
    try:
        assert turing_mma.cache_factor() == ""
        assert compile_block().way is None
        current = 0
        assert turing_mma.cache_factor() != ""
        assert compile_block().way == turing_mma.ON_TENSOR_CORES
    finally:
        turing_mma.disable()
        turing_mma._devices_without_tensor_cores.cache_clear()


def test_the_kernel_cache_on_disk_keeps_the_two_apart() -> None:
    stock = compile_block()
    turing_mma.enable()
    try:
        ours = compile_block()
        again = compile_block()
    finally:
        turing_mma.disable()
    assert compile_block() == stock
    assert again == ours
    assert ours.tensor_core != stock.tensor_core


def test_the_keys_of_every_cache_change() -> None:
    backend = CUDABackend(TURING)
    before = backend.hash()
    assert turing_mma.cache_factor() == ""
    turing_mma.enable()
    try:
        factor = turing_mma.cache_factor()
        assert factor.startswith("-turing-mma-")
        assert backend.hash() == before + factor
        assert knobs.runtime.add_stages_inspection_hook() == (factor, factor)
    finally:
        turing_mma.disable()
    assert backend.hash() == before


def test_triton_calls_the_hook_as_we_expect() -> None:
    """Fails where a release of Triton changes what the lowering stands on."""
    assert turing_mma.contract_breach() is None
    seen: list[tuple[Any, ...]] = []

    def look(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:
            return "", ""
        seen.append(arguments)
        assert list(arguments[1]) == ["ttir", "ttgir", "llir", "ptx", "cubin"]
        return None

    knobs.runtime.add_stages_inspection_hook = look
    try:
        compile_block()
    finally:
        knobs.runtime.add_stages_inspection_hook = None
    [(backend, _, options, language, capability)] = seen
    assert isinstance(backend, CUDABackend)
    assert (options.num_stages, language, capability) == (3, Language.TRITON, 75)


def test_an_unknown_triton_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make_ttgir(module: Any, options: Any) -> Any:
        raise AssertionError("not to be called")

    monkeypatch.setattr(CUDABackend, "make_ttgir", make_ttgir)
    assert not turing_mma.enable()
    assert not turing_mma.is_enabled()
    assert "makes TTGIR from (module, options)" in caplog.text


def test_a_hook_that_was_there_before_stays_in_use() -> None:
    compiled_kernels = []

    def other(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:
            return "other-key", "other-digest"
        compiled_kernels.append(arguments[1])
        return None

    knobs.runtime.add_stages_inspection_hook = other
    try:
        turing_mma.enable()
        factor = turing_mma.cache_factor()
        hook = knobs.runtime.add_stages_inspection_hook
        assert hook() == ("other-key" + factor, "other-digest" + factor)
        assert compile_block().way == turing_mma.ON_TENSOR_CORES
        assert len(compiled_kernels) == 1
        turing_mma.disable()
        assert knobs.runtime.add_stages_inspection_hook is other
    finally:
        turing_mma.disable()
        knobs.runtime.add_stages_inspection_hook = None


def test_a_hook_that_makes_its_own_ttgir_wins(caplog: pytest.LogCaptureFixture) -> None:
    def other(*arguments: Any) -> tuple[str, str] | None:
        if not arguments:
            return "", ""
        stock = arguments[1]["ttgir"]
        arguments[1]["ttgir"] = lambda module, metadata: stock(module, metadata)
        return None

    turing_mma._log_refusal.cache_clear()
    knobs.runtime.add_stages_inspection_hook = other
    turing_mma.enable()
    try:
        assert compile_block().tensor_core == {}
    finally:
        turing_mma.disable()
        knobs.runtime.add_stages_inspection_hook = None
    assert "another stage hook replaced the TTGIR stage" in caplog.text


def test_a_hook_over_ours_survives_disable() -> None:
    turing_mma.enable()
    below = knobs.runtime.add_stages_inspection_hook

    def over(*arguments: Any) -> Any:
        return below(*arguments)

    knobs.runtime.add_stages_inspection_hook = over
    try:
        turing_mma.disable()
        assert knobs.runtime.add_stages_inspection_hook is over
        assert over() == ("", "")
        assert compile_block().tensor_core == {}
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def test_a_hook_over_ours_may_make_its_own_ptx() -> None:
    """As emulation does, which has PTX made for another architecture than the assembler's."""
    turing_mma.enable()
    below = knobs.runtime.add_stages_inspection_hook

    def over(*arguments: Any) -> Any:
        answer = below(*arguments)
        if arguments:
            backend, stages, options, _, capability = arguments
            stages["ptx"] = lambda source, metadata: backend.make_ptx(
                source, metadata, options, capability
            )
        return answer

    knobs.runtime.add_stages_inspection_hook = over
    try:
        assert compile_block().tensor_core == {HMMA: 32}
    finally:
        turing_mma.disable()
        knobs.runtime.add_stages_inspection_hook = None


def test_kernels_loaded_before_are_looked_up_again_where_triton_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for version, kept in (("3.6.0", False), ("3.7.1", True)):
        monkeypatch.setattr(turing_mma.triton, "__version__", version)
        block.device_caches[0] = ("loaded",)
        turing_mma.enable()
        try:
            assert (0 in block.device_caches) == kept
        finally:
            turing_mma.disable()
            block.device_caches.clear()
