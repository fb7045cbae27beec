# SPDX-License-Identifier: Apache-2.0
"""The worker of an emulated card on a CPU, in which a sampled token can be taken back.

A prompt that takes several steps has a token sampled after each, and upstream throws all but the last
away. For a request with a seed it rewinds the request's generator by an offset, which PyTorch's CPU
generators do not have (vLLM 0.32, v1/worker/gpu_model_runner.py): the engine ends.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RewindingCPUModelRunner(CPUModelRunner):
    """Upstream's runner; the generator of a discarded token goes back to where it was before it."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._before_sampling: dict[int, torch.Tensor] = {}

    def _sample(self, *arguments: Any, **more: Any) -> Any:
        generators = self.input_batch.generators
        self._before_sampling = {row: each.get_state() for row, each in generators.items()}
        return super()._sample(*arguments, **more)

    def _bookkeeping_sync(self, *arguments: Any, **more: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        # Out of upstream's sight meanwhile, which would ask them for an offset.
        rewound = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
        for row, generator in rewound.items():
            generator.set_state(self._before_sampling[row])
        try:
            return super()._bookkeeping_sync(*arguments, **more)
        finally:
            generators.update(rewound)


# Upstream's worker makes its runner of the class that its module names.
cpu_worker.CPUModelRunner = RewindingCPUModelRunner


class EmulatedCpuWorker(cpu_worker.CPUWorker):
    """Upstream's worker, with that runner."""
