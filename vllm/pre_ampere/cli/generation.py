# SPDX-License-Identifier: Apache-2.0
"""Greedy generation by a real engine in a process of its own, for commands that compare engines.

An engine claims its device until its process ends, so each configuration gets a process: `generate`
starts this module as a program with a `Job` and collects what it says. The engine's own output goes
to a log, of which the end is shown if it fails.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm.pre_ampere.cli import UserError, engine_log, engine_options, processes
from vllm.pre_ampere.cli.prompts import SAMPLE_TEXT, draw_prompts

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

# Engine steps between two arrivals of requests that run together.
_STEPS_BETWEEN_ARRIVALS = 3


@dataclass(frozen=True)
class Job:
    """What one engine is asked to do.

    Attributes:
        model: the checkpoint's folder.
        num_speculative_tokens: k; 0 without speculation.
        lengths: of the prompts, in tokens.
        tokens: how many to generate for each prompt.
        together: whether the prompts run in one batch, each arriving a few steps after the one
            before it; else one after the other.
        text: what the prompts are drawn from.
        engine_arguments: options as `vllm serve` takes them.
        compare_with: for each prompt, the tokens of another engine; where this one's differ, the
            logits of the two candidates are asked for.
        traces: folder in which each worker leaves a profiler's trace of its steps; empty for none.
        untraced_steps: the first steps of the engine that are left out of it.
        traced_steps: steps after those that it holds.
    """

    model: str
    num_speculative_tokens: int
    lengths: tuple[int, ...]
    tokens: int
    together: bool = False
    text: str = SAMPLE_TEXT
    engine_arguments: tuple[str, ...] = ()
    compare_with: tuple[tuple[int, ...], ...] = ()
    traces: str = ""
    untraced_steps: int = 0
    traced_steps: int = 0


@dataclass(frozen=True)
class Answer:
    """What the engine made of one prompt.

    Attributes:
        length: of the prompt, in tokens.
        tokens: the generated ids.
        tokens_per_second: after the first token, which ends prefill.
        acceptance_length: tokens a verification step yields, in [1, k + 1]; None without
            speculation. Requests that ran together share one figure.
    """

    length: int
    tokens: tuple[int, ...]
    tokens_per_second: float
    acceptance_length: float | None


@dataclass(frozen=True)
class Difference:
    """Where two engines' answers to one prompt part.

    Attributes:
        prompt: its index.
        position: index of the first generated token that differs.
        tokens: what this engine chose there, and what the other did.
        logits: of these two, by this engine, in float32.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    logits: tuple[float, float]


@dataclass(frozen=True)
class Result:
    """What `generate` returns.

    Attributes:
        device: name and capability of the device, or that it is emulated.
        answers: one a prompt that fits the model.
        left_out: lengths that do not fit into the model's context with the tokens asked for.
        differences: from `Job.compare_with`.
    """

    device: str
    answers: tuple[Answer, ...]
    left_out: tuple[int, ...] = ()
    differences: tuple[Difference, ...] = field(default=())


def generate(job: Job, on_progress: Callable[[int, int], None]) -> Result:
    """Run a job in a process of its own.

    Args:
        job: see there.
        on_progress: told the tokens generated so far, and how many there will be.

    Raises:
        UserError: the engine was refused, or did not start, or failed; then the message holds the end
            of its log.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-pre-ampere-") as folder:
        request, log = Path(folder) / "job.json", Path(folder) / "engine.log"
        request.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", __name__, str(request)]
        result = None
        with log.open("w") as output, processes.engine(command, output) as process:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if "refused" in event:
                    raise UserError(event["refused"])
                if "result" in event:
                    result = _result_from(event["result"])
                else:
                    on_progress(event["done"], event["total"])
            process.wait()
        if result is None:
            reason = engine_log.why(log.read_text())
            raise UserError(f"the engine ended with exit status {process.returncode}: {reason}")
        return result


def _result_from(data: dict[str, Any]) -> Result:
    return Result(
        data["device"],
        tuple(Answer(**{**a, "tokens": tuple(a["tokens"])}) for a in data["answers"]),
        tuple(data["left_out"]),
        tuple(
            Difference(d["prompt"], d["position"], tuple(d["tokens"]), tuple(d["logits"]))
            for d in data["differences"]
        ),
    )


def _job_from(data: dict[str, Any]) -> Job:
    return Job(
        **{
            **data,
            "lengths": tuple(data["lengths"]),
            "engine_arguments": tuple(data["engine_arguments"]),
            "compare_with": tuple(tuple(tokens) for tokens in data["compare_with"]),
        }
    )


def main() -> None:
    """The program that `generate` starts: reads a job, prints progress and the result as JSON."""
    job = _job_from(json.loads(Path(sys.argv[1]).read_text()))
    # Whatever the engine and the libraries print goes to the log; standard output is ours.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    try:
        llm = _start(job)
    except ValidationError as error:
        # What upstream and the platform refuse while they make the configuration.
        say({"refused": engine_options.first_reason(error)})
        return
    limit = llm.model_config.max_model_len - job.tokens
    lengths = [length for length in job.lengths if length <= limit]
    prompts = draw_prompts(
        None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer(),
        llm.model_config.get_vocab_size(),
        lengths,
        job.text,
    )
    total = job.tokens * len(prompts)
    answers: list[Answer] = []
    if job.traces:
        llm.start_profile(delay_iterations=job.untraced_steps, max_iterations=job.traced_steps)
    for indices in [range(len(prompts))] if job.together else [[i] for i in range(len(prompts))]:
        before = len(answers) * job.tokens

        def progress(done: int, before: int = before) -> None:
            say({"done": before + done, "total": total})

        answers += _answer(llm, [prompts[index] for index in indices], job.tokens, progress)
    if job.traces:
        llm.stop_profile()
    differences = [
        _difference(llm, index, prompts[index], answers[index].tokens, other)
        for index, other in enumerate(job.compare_with)
        if answers[index].tokens != other
    ]
    left_out = tuple(length for length in job.lengths if length > limit)
    result = Result(_device(), tuple(answers), left_out, tuple(differences))
    say({"result": asdict(result)})


def _start(job: Job) -> "LLM":
    from vllm.config import ProfilerConfig

    from vllm import LLM

    arguments = engine_options.parse(job.model, job.engine_arguments)
    arguments.disable_log_stats = False  # The acceptance length comes from the statistics.
    arguments.logprobs_mode = "raw_logits"
    if job.traces:
        arguments.profiler_config = ProfilerConfig(
            profiler="torch",
            torch_profiler_dir=job.traces,
            torch_profiler_with_stack=False,
            ignore_frontend=True,
        )
    arguments.speculative_config = (
        {"method": "mtp", **(arguments.speculative_config or {})}
        | {"num_speculative_tokens": job.num_speculative_tokens}
        if job.num_speculative_tokens
        else None
    )
    return LLM.from_engine_args(arguments)


def _sampling(tokens: int, candidates: list[int] | None = None) -> "SamplingParams":
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprob_token_ids=candidates,
    )


def _answer(
    llm: "LLM", prompts: Sequence[list[int]], tokens: int, progress: Callable[[int], None]
) -> list[Answer]:
    """Answers to prompts that run together."""
    engine = llm.llm_engine
    drafts, accepted = _speculation_counters(llm)
    arrivals = iter(enumerate(prompts))
    started: dict[str, int] = {}
    generated = [0] * len(prompts)
    first_token = [0.0] * len(prompts)
    last_token = [0.0] * len(prompts)
    ids: list[tuple[int, ...]] = [()] * len(prompts)

    def arrive() -> None:
        for index, prompt in arrivals:
            engine.add_request(str(index), {"prompt_token_ids": prompt}, _sampling(tokens))
            started[str(index)] = index
            return

    arrive()
    for step in _steps_until_idle(llm):
        now = time.monotonic()
        for output in step.outputs:
            index = started[output.request_id]
            ids[index] = tuple(output.outputs[0].token_ids)
            if not generated[index]:
                first_token[index] = now
            generated[index], last_token[index] = len(ids[index]), now
        progress(sum(generated))
        if step.number % _STEPS_BETWEEN_ARRIVALS == 0 or not engine.has_unfinished_requests():
            arrive()

    drafts, accepted = (
        after - before
        for after, before in zip(_speculation_counters(llm), (drafts, accepted), strict=True)
    )
    return [
        Answer(
            len(prompt),
            ids[index],
            # The tokens of the step that ended prefill are not among those timed.
            (generated[index] - 1) / max(last_token[index] - first_token[index], 1e-9),
            1 + accepted / drafts if drafts else None,
        )
        for index, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class _Step:
    number: int
    outputs: list[Any]


def _steps_until_idle(llm: "LLM") -> Iterator[_Step]:
    number = 0
    while llm.llm_engine.has_unfinished_requests():
        number += 1
        yield _Step(number, llm.llm_engine.step())


def _speculation_counters(llm: "LLM") -> tuple[int, int]:
    """Verification steps and accepted draft tokens since the engine started."""
    counts = {"vllm:spec_decode_num_drafts": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in counts:
            counts[metric.name] += getattr(metric, "value", 0)
    drafts, accepted = counts.values()
    return drafts, accepted


def _difference(
    llm: "LLM", index: int, prompt: list[int], mine: tuple[int, ...], other: tuple[int, ...]
) -> Difference:
    """Where two answers part, with the logits of both candidates.

    The prompt runs once more, alone and step by step as before, up to that token.
    """
    position = next(
        (place for place, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b),
        min(len(mine), len(other)),
    )
    if position == min(len(mine), len(other)):
        raise RuntimeError(f"the engines generated {len(mine)} and {len(other)} tokens")
    candidates = [mine[position], other[position]]
    llm.reset_prefix_cache()
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}], _sampling(position + 1, candidates), use_tqdm=False
    )
    logits = output.outputs[0].logprobs[position]
    first, second = (float(logits[token].logprob) for token in candidates)
    return Difference(index, position, (candidates[0], candidates[1]), (first, second))


def _device() -> str:
    from vllm.platforms import current_platform

    from vllm.pre_ampere.platform.hooks import PreAmperePlatform

    if isinstance(current_platform, PreAmperePlatform):
        device = current_platform.answering_device()
        kind = f"emulated {device.architecture}" if device.emulated else device.name
        where = "CPU" if current_platform.is_cpu() else "GPU"
        return f"{kind} on a {where}" if device.emulated else kind
    return str(current_platform.get_device_name())


if __name__ == "__main__":
    main()
