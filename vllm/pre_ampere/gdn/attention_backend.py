# SPDX-License-Identifier: Apache-2.0
"""What upstream is told about the layer's steps: its own metadata, and that rows stay apart."""

from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend


class PreAmpereGDNAttentionBackend(GDNAttentionBackend):
    """Upstream's backend of GDN layers, allowed with `VLLM_BATCH_INVARIANT=1`.

    Upstream refuses the two together, for there one kernel decodes and another verifies. In our layer
    one routine does both, a request's row is computed from its own inputs and state alone, and a
    prompt by chunks of its own. What stays dependent on other requests is where steps end within a
    prompt, and what computes a last stretch of one token; see docs/speculation.md. Layers of other
    models that use upstream's backend keep it.
    """

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a request's result does not depend on those beside it."""
        return True
