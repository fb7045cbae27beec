# SPDX-License-Identifier: Apache-2.0
"""The hooks that every platform class of ours has, whatever it computes on.

A mixin: `cpu.py` joins it to upstream's CPU platform (an emulated card), `cuda.py` to upstream's
CUDA platform. Upstream asks most questions about "the" device without saying which; here the answer
is the current card in a worker and the oldest participating card anywhere else, never device 0.
"""

from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import DeviceCapability, Platform

from vllm.pre_ampere import baseline, environment, guards
from vllm.pre_ampere.devices import Device, lowest_capability
from vllm.pre_ampere.gdn import prefill
from vllm.pre_ampere.guards import quantized_refusals
from vllm.pre_ampere.guards.action import Action

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger("vllm.pre_ampere.platform")

_SPLITTING_OPERATORS = (
    "vllm::qwen_gdn_full_forward",
    "vllm::qwen_gdn_attention_core_standard_spec",
)


class PreAmperePlatform(Platform):
    """Hooks for a box with a pre-Ampere card, real or emulated."""

    own_attention_backends: ClassVar[Collection[str]] = ()
    baseline_record: ClassVar[baseline.BaselineRecord | None] = None
    guard_actions: ClassVar[tuple[Action, ...]] = ()

    @classmethod
    @abstractmethod
    def devices(cls, ranks: int) -> tuple[Device, ...]:
        """The cards that local ranks 0 to `ranks` - 1 use."""

    @classmethod
    @abstractmethod
    def worker_device(cls) -> Device:
        """The card of this worker.

        Raises:
            RuntimeError: this process is no worker.
        """

    @classmethod
    @abstractmethod
    def answering_device(cls) -> Device:
        """The card that answers a question which names none."""

    @classmethod
    def participating_devices(cls, parallel_config: "ParallelConfig") -> tuple[Device, ...]:
        """The cards that take part on this host, in rank order."""
        replicas = max(parallel_config.data_parallel_size_local, 1)
        return cls.devices(parallel_config.local_world_size * replicas)

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.float32]

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        super().pre_register_and_update(parser)
        try:
            for variable in environment.OURS:
                variable.get()
        except environment.EnvironmentVariableError as error:
            if parser is not None:
                parser.error(str(error))
            raise
        if parser is not None:
            prefill.add_backend_choices(parser)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        super().apply_config_platform_defaults(vllm_config)
        cls.baseline_record = baseline.apply(
            vllm_config,
            cls.participating_devices(vllm_config.parallel_config),
            cls.own_attention_backends,
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        _refuse_bfloat16(vllm_config)
        devices = cls.participating_devices(vllm_config.parallel_config)
        _refuse_fp8_cache(vllm_config, oldest(devices))
        prefill.check_requested_backend(vllm_config, devices, cls.device_type == "cpu")
        super().check_and_update_config(vllm_config)
        _split_at_our_operators(vllm_config)
        cls.guard_actions = guards.check(vllm_config, devices)

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        device = cls.answering_device()
        quantized_refusals.refuse_unsupported(quant, device)
        super().verify_quantization(quant)

    @classmethod
    def get_device_capability(cls, device_id: int | None = None) -> DeviceCapability:
        device = cls.answering_device() if device_id is None else cls.devices(device_id + 1)[-1]
        return DeviceCapability(*device.capability)

    @classmethod
    def has_device_capability(
        cls, capability: tuple[int, int] | int, device_id: int | None = None
    ) -> bool:
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return cls.get_device_capability(device_id) >= DeviceCapability(*wanted)

    @classmethod
    def is_device_capability(
        cls, capability: tuple[int, int] | int, device_id: int | None = None
    ) -> bool:
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return cls.get_device_capability(device_id) == DeviceCapability(*wanted)

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int | None = None) -> bool:
        return cls.get_device_capability(device_id).major == capability // 10

    @classmethod
    def get_device_name(cls, device_id: int | None = None) -> str:
        device = cls.answering_device() if device_id is None else cls.devices(device_id + 1)[-1]
        return device.name


def oldest(devices: tuple[Device, ...]) -> Device:
    """The card whose limits bind a decision made for all of `devices`."""
    capability = lowest_capability(devices)
    return next(device for device in devices if device.capability == capability)


def _refuse_bfloat16(vllm_config: "VllmConfig") -> None:
    """Raise where the user asked for bfloat16: automatic choices never give it here.

    Raises:
        ValueError: names the setting and what to pass instead.
    """
    cache = vllm_config.cache_config
    settings = [
        ("--kv-cache-dtype", cache.cache_dtype),
        ("--mamba-cache-dtype", cache.mamba_cache_dtype),
        ("--mamba-ssm-cache-dtype", cache.mamba_ssm_cache_dtype),
    ]
    if vllm_config.model_config is not None:
        settings.insert(0, ("--dtype", vllm_config.model_config.dtype))
    for option, value in settings:
        if value in (torch.bfloat16, "bfloat16"):
            remedy = "float32" if option == "--mamba-ssm-cache-dtype" else "float16"
            raise ValueError(
                f"{option} bfloat16 was asked for, but cards before Ampere (capability 8.0) have no "
                f"bfloat16 arithmetic; pass {option} {remedy}, or leave it on auto"
            )


def _refuse_fp8_cache(vllm_config: "VllmConfig", device: Device) -> None:
    """Raise where upstream's Triton attention would, before weights load and on an emulated card, too.

    Its rule (vLLM 0.32, v1/attention/backends/triton_attn.py) is asked while the model is built, and
    on CUDA alone.

    Raises:
        ValueError: names the setting and what to pass instead.
    """
    asked = vllm_config.cache_config.cache_dtype
    if asked.startswith("fp8") and device.is_pre_ampere:
        major, minor = device.capability
        raise ValueError(
            f"--kv-cache-dtype {asked} was asked for, but attention converts fp8 from capability 8.9 "
            f"on, and {device.name} has {major}.{minor}; pass --kv-cache-dtype float16, or leave it on "
            "auto"
        )


def _split_at_our_operators(vllm_config: "VllmConfig") -> None:
    """Make the GDN operators of ours boundaries of the compiled graph, beside upstream's own.

    Upstream fills `splitting_ops` after this hook, and only where it is None.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return
    if compilation.splitting_ops is None:
        if compilation.pass_config.fuse_attn_quant and not compilation.use_inductor_graph_partition:
            return
        compilation.splitting_ops = list(compilation._attention_ops)
        if not compilation.use_inductor_graph_partition:
            compilation.pass_config.fuse_rope_kvcache = False
            compilation.pass_config.fuse_qk_norm_rope_kvcache = False
            compilation.splitting_ops += [
                "vllm::unified_kv_cache_update",
                "vllm::unified_mla_kv_cache_update",
            ]
    elif not compilation.splitting_ops:
        return
    missing = [name for name in _SPLITTING_OPERATORS if name not in compilation.splitting_ops]
    compilation.splitting_ops.extend(missing)
