# SPDX-License-Identifier: Apache-2.0
"""The largest activation of each layer, against the largest number of float16.

`look` runs one prompt on a real engine in a process of its own, eagerly, with a forward hook on
every module; `ProbeExtension` is what upstream's `worker_extension_cls` adds to its worker for that.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm.pre_ampere.cli import UserError, engine_log, engine_options, processes
from vllm.pre_ampere.cli.checkpoint import Checkpoint
from vllm.pre_ampere.cli.prompts import draw_prompts

FLOAT16_LARGEST = 65504.0
_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Activation:
    """What one layer put out.

    Attributes:
        layer: its name in the model.
        largest: absolute value of the largest finite element of any module in it.
        module: the module that put it out.
        finite: no module in it put out inf or NaN.
    """

    layer: str
    largest: float
    module: str
    finite: bool

    @property
    def share(self) -> float:
        """Of float16's range."""
        return self.largest / FLOAT16_LARGEST


@dataclass(frozen=True)
class Probe:
    """What a prompt did to the model.

    Attributes:
        layers: in the order in which they ran.
        first_overflow: the first module with inf or NaN, in the order in which they ran; None
            where there is none.
        nan_logits: the request failed because its logits were NaN.
    """

    layers: tuple[Activation, ...]
    first_overflow: str | None
    nan_logits: bool

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "float16_largest": FLOAT16_LARGEST,
            "first_overflow": self.first_overflow,
            "nan_logits": self.nan_logits,
            "layers": [vars(layer) for layer in self.layers],
        }


class ProbeExtension:
    """Methods that upstream's worker gets; the engine calls them on every rank."""

    model_runner: Any

    def attach_probe(self) -> None:
        """Watch what every module puts out from now on."""
        self._seen: dict[str, tuple[float, bool]] = {}
        self._overflows: list[str] = []
        for name, module in self.model_runner.get_model().named_modules():
            if name:
                module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                finite = bool(torch.isfinite(tensor).all())
                largest = float(torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0).abs().amax())
                before, was_finite = self._seen.get(name, (0.0, True))
                self._seen[name] = (max(before, largest), was_finite and finite)
                if not finite:
                    self._overflows.append(name)

        return hook

    def read_probe(self) -> str:
        """What was seen, as JSON: module -> largest and finite, and the first overflow."""
        return json.dumps({"seen": self._seen, "first": self._overflows[:1]})


def _tensors(output: Any) -> list[torch.Tensor]:
    parts = output if isinstance(output, tuple | list) else [output]
    return [p for p in parts if isinstance(p, torch.Tensor) and p.is_floating_point() and p.numel()]


def by_layer(seen: dict[str, tuple[float, bool]]) -> tuple[Activation, ...]:
    """Put modules together into the layers they belong to.

    Args:
        seen: module -> largest absolute finite value, and whether all were finite; in any order.
    """
    layers: dict[str, list[tuple[float, str, bool]]] = {}
    for name, (largest, finite) in seen.items():
        layers.setdefault(_layer(name), []).append((largest, name, finite))
    return tuple(
        Activation(layer, *max(found)[:2], finite=all(finite for *_, finite in found))
        for layer, found in sorted(layers.items(), key=lambda item: _place(item[0]))
    )


def _layer(module: str) -> str:
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return module


def _place(layer: str) -> tuple[int, float, str]:
    """Embedding first, then the numbered layers, then what comes after them."""
    last = layer.rsplit(".", 1)[-1]
    if last.isdecimal():
        return 1, float(last), layer
    return (0, 0.0, layer) if "embed" in last else (2, math.inf, layer)


def look(checkpoint: Checkpoint, options: Sequence[str]) -> Probe:
    """Run one prompt on the model.

    Raises:
        UserError: the engine did not start; the message holds the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-pre-ampere-") as folder:
        result, log = Path(folder) / "probe.json", Path(folder) / "engine.log"
        command = [sys.executable, "-m", __name__, str(checkpoint.path), str(result), *options]
        with log.open("w") as output, processes.engine(command, output) as process:
            process.wait()
        if not result.exists():
            reason = engine_log.why(log.read_text())
            raise UserError(f"the engine ended with exit status {process.returncode}: {reason}")
        data = json.loads(result.read_text())
    seen = {name: (largest, finite) for name, (largest, finite) in data["seen"].items()}
    return Probe(by_layer(seen), next(iter(data["first"]), None), data["nan_logits"])


def main() -> None:
    """The program that `look` starts: MODEL RESULT [ENGINE OPTIONS]."""
    from vllm import LLM, SamplingParams

    # vLLM logs to standard output, tracebacks go to standard error: one log, in the order of events.
    os.dup2(2, 1)
    model, result, *options = sys.argv[1:]
    arguments = engine_options.parse(model, options)
    arguments.enforce_eager = True  # A compiled graph runs past the hooks.
    arguments.worker_extension_cls = f"{ProbeExtension.__module__}.{ProbeExtension.__qualname__}"
    llm = LLM.from_engine_args(arguments)
    tokenizer = None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()
    (prompt,) = draw_prompts(tokenizer, llm.model_config.get_vocab_size(), [_PROMPT_TOKENS])
    llm.collective_rpc("attach_probe")
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0.0, max_tokens=2, detokenize=False),
        use_tqdm=False,
    )
    ranks = [json.loads(text) for text in llm.collective_rpc("read_probe")]
    seen: dict[str, tuple[float, bool]] = {}
    for rank in ranks:
        for name, (largest, finite) in rank["seen"].items():
            before, was_finite = seen.get(name, (0.0, True))
            seen[name] = (max(before, largest), was_finite and finite)
    first: list[str] = next((rank["first"] for rank in ranks if rank["first"]), [])
    nan_logits = output.outputs[0].finish_reason == "error"
    Path(result).write_text(json.dumps({"seen": seen, "first": first, "nan_logits": nan_logits}))


if __name__ == "__main__":
    main()
