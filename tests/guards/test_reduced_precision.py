# SPDX-License-Identifier: Apache-2.0
"""Guard 6: what these cards cannot compute is refused by name, by us or by upstream."""

import re
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

import vllm


class Turing:
    """The answers of a Turing card to the questions that upstream's attention asks."""

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self) -> DeviceCapability:
        return DeviceCapability(7, 5)

    def has_device_capability(self, capability: int) -> bool:
        return capability <= 75

    def get_device_name(self) -> str:
        return "Tesla T4"


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("fp8", "float16"),
        ("fp8_e4m3", "float16"),
        ("fp8_e5m2", "float16"),
        ("fp8_per_token_head", "float16"),
        ("bfloat16", "float16"),
    ],
)
def test_upstream_refuses_these_kv_caches_on_turing(
    monkeypatch: pytest.MonkeyPatch, dtype: str, remedy: str
) -> None:
    """What the platform refuses earlier: v1/attention/backends/triton_attn.py, vLLM 0.32."""
    monkeypatch.setattr(triton_attn, "current_platform", Turing())
    with pytest.raises(ValueError, match=f"Tesla T4.*--kv-cache-dtype {remedy}"):
        TritonAttentionImpl(
            num_heads=4,
            head_size=64,
            scale=1.0,
            num_kv_heads=2,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype=dtype,
        )


@triton.jit
def widen(source, destination):
    tl.store(destination, tl.load(source).to(tl.float16))


def compile_for_turing(pointer: str) -> None:
    source = ASTSource(widen, {"source": pointer, "destination": "*fp16"}, {}, {})
    triton.compile(source, target=GPUTarget("cuda", 75, 32))


def test_triton_widens_e5m2_on_turing_and_not_e4m3() -> None:
    """What the refusal of fp8 rests on; of the two formats only e4m3 needs capability 8.9."""
    compile_for_turing("*fp8e5")
    with pytest.raises(CompilationError, match="fp8e4nv not supported"):
        compile_for_turing("*fp8e4nv")


def test_upstream_asks_nowhere_for_emulated_bfloat16() -> None:
    """`torch.cuda.is_bf16_supported()` counts emulation as support; upstream does not ask it."""
    sources = [p for p in Path(vllm.__path__[0]).rglob("*.py") if "pre_ampere" not in p.parts]
    assert len(sources) > 1000
    asking = [p for p in sources if re.search(r"is_bf16_supported", p.read_text())]
    assert asking == []
