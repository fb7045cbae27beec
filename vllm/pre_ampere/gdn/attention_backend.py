# SPDX-License-Identifier: Apache-2.0
"""What upstream is told about the layer's steps: its own metadata, and that rows stay apart."""

from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend


class PreAmpereGDNAttentionBackend(GDNAttentionBackend):
    """Upstream's backend of GDN layers, allowed with `VLLM_BATCH_INVARIANT=1`.

    Upstream refuses the two together, for there one kernel decodes and another verifies. Here one
    routine does both, a request's row is computed from its own inputs and state alone, and a prompt
    by chunks of its own. What stays dependent on other requests is where a step ends within a long
    prompt; see docs/speculation.md.
    """

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a request's result does not depend on those beside it."""
        return True


def register() -> None:
    """Put it in the place of upstream's; a second call changes nothing."""
    register_backend(
        MambaAttentionBackendEnum.GDN_ATTN,
        f"{PreAmpereGDNAttentionBackend.__module__}.{PreAmpereGDNAttentionBackend.__qualname__}",
        is_mamba=True,
    )
