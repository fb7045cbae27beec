# SPDX-License-Identifier: Apache-2.0
"""What has to be changed in upstream because there is no hook for it. The goal is an empty file.

Each entry says what it changes, why, which hook is missing, and when it goes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device

if TYPE_CHECKING:
    from vllm.pre_ampere.kernels.triton.launch_configurations import Lowering

_FAILED = "Internal server error"

logger = init_logger("vllm.pre_ampere.upstream_patches")


def apply(visible: Sequence[Device]) -> None:
    """Apply the entries that the cards of this process need.

    Args:
        visible: all cards that this process sees.
    """
    _name_the_probe()
    if any(device.is_turing and not device.has_tensor_cores for device in visible):
        _multiply_in_float32_without_tensor_cores(visible)


def _name_the_probe() -> None:
    """What a client reads whose request failed, for NaN logits among other reasons.

    What: the message of `GenerationError` of vllm.exceptions.
    Why: a client reads "Internal server error" and nothing else.
    Missing: serving is told a request's finish reason, and not the stop reason that says why.
    Goes: when upstream's answer has the stop reason.
    """
    from vllm.exceptions import GenerationError

    told = GenerationError.__init__

    def tell(self: GenerationError, message: str = _FAILED) -> None:
        from vllm.pre_ampere.guards.nan_logits import PROBE

        if message == _FAILED and environment.COMPUTE_NANS_IN_LOGITS.get():
            message = (
                f"{_FAILED}; the server's log says why. Where logits are NaN, `{PROBE}` names the "
                "layer that overflows float16"
            )
        told(self, message)

    GenerationError.__init__ = tell


def _multiply_in_float32_without_tensor_cores(visible: Sequence[Device]) -> None:
    """Unquantised float16 products of several rows, on Turing cards without tensor cores.

    What: `default_unquantized_gemm` of vllm.model_executor.layers.utils.
    Why: cuBLAS runs them at a twentieth of memory speed there; see guards/without_tensor_cores.py.
    Missing: `dispatch_unquantized_gemm` asks the platform nothing that a subclass could answer.
    Goes: when it does, or when cuBLAS chooses a better kernel (PyTorch issue 195716).
    """
    from vllm.model_executor.layers import utils

    from vllm.pre_ampere.guards import without_tensor_cores

    without_tensor_cores.register(visible)
    utils.default_unquantized_gemm = without_tensor_cores.unquantized_gemm
    logger.info_once("Patched default_unquantized_gemm: float16 products run in float32")


def scale_key_products_afterwards() -> None:
    """The key products of a prefill chunk, where Triton puts products on Turing's tensor cores.

    What: `chunk_scaled_dot_kkt_fwd` as `chunk_gated_delta_rule` calls it.
    Why: upstream multiplies the keys by beta in float32 before their product, which keeps that
    product off the tensor cores; ours scales afterwards, which is the same number.
    Missing: the parts of the prefill chain are plain functions, bound at import.
    Goes: when upstream's kernel scales afterwards, or prefill has a kernel of ours.
    """
    from vllm.third_party.flash_linear_attention.ops import chunk

    from vllm.pre_ampere.kernels.triton.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd

    chunk.chunk_scaled_dot_kkt_fwd = chunk_scaled_dot_kkt_fwd


def multiply_in_tiles_by_rows(lowering: "Lowering") -> None:
    """Unquantised linear layers with `VLLM_BATCH_INVARIANT=1`.

    What: `linear_batch_invariant` as the linear layers and the vocabulary's call it.
    Why: upstream's has tiles of 128 rows for float16 whatever the batch, so a step that decodes
    one token multiplies 128; scalar code of them spills kilobytes of registers a thread.
    Missing: its table of launches is closed, and has none for float16 or for cards before 8.9.
    Goes: when the table can be added to, or has these cards.

    Args:
        lowering: how this process's card has its matrix products compiled.
    """
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    from vllm.pre_ampere.kernels.triton import batch_invariant_linear

    batch_invariant_linear.use(lowering)
    for module in (linear, vocab_parallel_embedding):
        module.linear_batch_invariant = batch_invariant_linear.call


def widen_attention_of_prompts() -> None:
    """Paged attention of prompts, where Triton puts products on Turing's tensor cores.

    What: `kernel_unified_attention` as `unified_attention` launches it.
    Why: its blocks have 16 rows, and read all keys and values again for every few tokens.
    Missing: its launch is written for capability 10.0 alone, and asks nobody otherwise.
    Goes: when upstream's launches for heads of 256 include these cards.
    """
    from vllm.v1.attention.ops import triton_unified_attention

    from vllm.pre_ampere.kernels.triton.unified_attention_launch import WideAttention

    kernel = triton_unified_attention.kernel_unified_attention
    if not isinstance(kernel, WideAttention):
        triton_unified_attention.kernel_unified_attention = WideAttention(kernel)
