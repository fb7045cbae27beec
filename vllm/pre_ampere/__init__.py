# SPDX-License-Identifier: Apache-2.0
"""vLLM for the cards that vLLM left behind: Turing (sm75) and Volta (sm70, sm72).

The two functions here are the entry points through which the installed upstream vLLM finds us
(`vllm.platform_plugins` and `vllm.general_plugins`).
"""


def platform() -> str | None:
    """Name our platform class where a pre-Ampere card is visible or emulated, else None.

    Upstream calls this twice in each process, while it decides on `current_platform`, and swallows
    every exception that is raised here, to go on with a platform that nobody asked for.

    Raises:
        SystemExit: `VLLM_PRE_AMPERE_EMULATE` names no card; the message says which there are.
    """
    from vllm.platforms import vllm_version_matches_substr

    from vllm.pre_ampere import devices, environment

    on_cpu = vllm_version_matches_substr("cpu")
    if environment.EMULATE.is_set():
        try:
            environment.EMULATE.get()
        except environment.EnvironmentVariableError as error:
            raise SystemExit(str(error)) from None
        kind = "cpu.EmulatedCpuPlatform" if on_cpu else "cuda.EmulatedCudaPlatform"
        return f"vllm.pre_ampere.platform.{kind}"
    if on_cpu:
        return None
    if not devices.any_pre_ampere(devices.nvml_devices()):
        return None
    try:
        visible = devices.visible_devices(
            environment.CUDA_DEVICE_ORDER.get(), environment.CUDA_VISIBLE_DEVICES.get()
        )
    except RuntimeError:
        # Raised again, where the user sees it, by the first question the platform is asked.
        visible = devices.nvml_devices()
    if not devices.any_pre_ampere(visible):
        return None
    return "vllm.pre_ampere.platform.cuda.PreAmpereCudaPlatform"


def register() -> None:
    """Register our layer and operators with upstream; nothing where our platform is not in use."""
    from vllm.platforms import current_platform

    from vllm.pre_ampere.platform.hooks import PreAmperePlatform

    if not isinstance(current_platform, PreAmperePlatform):
        return
    from vllm.pre_ampere import devices, environment, upstream_patches
    from vllm.pre_ampere.gdn import layer

    layer.register()
    upstream_patches.apply(
        devices.visible_devices(
            environment.CUDA_DEVICE_ORDER.get(), environment.CUDA_VISIBLE_DEVICES.get()
        )
    )
