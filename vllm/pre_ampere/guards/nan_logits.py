# SPDX-License-Identifier: Apache-2.0
"""A request whose logits are NaN fails; it does not stream token 0 for ever.

A model trained in bfloat16 can overflow float16 (65504). Its logits are then NaN, and greedy choice
among NaN is the first one: token 0, for Qwen "!". Upstream (vLLM 0.32) counts NaN logits where
`VLLM_COMPUTE_NANS_IN_LOGITS` is 1 but only for its statistics; `VLLM_RAISE_ON_LOGIT_NANS` ends the
whole engine. Here the scheduler, which upstream lets a configuration name, ends the request.
"""

from collections.abc import Mapping, Sequence

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

logger = init_logger("vllm.pre_ampere.guards.nan_logits")

PROBE = "vllm-pre-ampere doctor --model MODEL --probe"
REASON = (
    "the model's logits are NaN: an activation overflowed float16 (largest value 65504). "
    f"`{PROBE}` names the first layer that does"
)


def requests_with_nan(
    request_ids: Sequence[str],
    nan_counts: Mapping[str, int],
    draft_tokens: Mapping[str, Sequence[int]],
    counted_by_request: bool = False,
) -> list[str]:
    """The requests of a step that have NaN among their logits.

    A single NaN is enough: it is the largest logit to argmax, and makes a softmax NaN throughout.

    Upstream's counts are of rows of logits, in the order of the requests, under the ids of as many
    requests as there are; but a request that is verified has a row for each draft token and one
    more. So a count is credited here to the request that its row belongs to. Rows past the number
    of requests are not reported; such a request is found once it stands further ahead in the batch.

    Args:
        request_ids: of the step, in the order of the batch.
        nan_counts: upstream's.
        draft_tokens: the drafts verified in the step, by request.
        counted_by_request: upstream has already summed the rows of each request, as its
            batch-sharded sampling does.
    """
    if counted_by_request:
        return [request for request in request_ids if nan_counts.get(request)]
    rows = [nan_counts.get(request, 0) for request in request_ids]
    found = []
    start = 0
    for request in request_ids:
        end = start + 1 + len(draft_tokens.get(request, ()))
        if any(rows[start:end]):
            found.append(request)
        start = end
    return found


class NanCheckingScheduler(Scheduler):
    """Upstream's scheduler; a request with NaN logits fails."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Upstream's, with the failed requests ended by an error and their token dropped."""
        nan_counts = model_runner_output.num_nans_in_logits or {}
        ids = (
            requests_with_nan(
                model_runner_output.req_ids,
                nan_counts,
                scheduler_output.scheduled_spec_decode_tokens,
                self.parallel_config.enable_batch_sharded_sampling,
            )
            if any(nan_counts.values())
            else []
        )
        failed = self.finish_requests(ids, RequestStatus.FINISHED_ERROR) if ids else []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in failed:
            logger.error("Request %s failed: %s.", request.request_id, REASON)
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=REASON,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs


class NanCheckingAsyncScheduler(NanCheckingScheduler, AsyncScheduler):
    """Upstream's asynchronous scheduler; a request with NaN logits fails."""
