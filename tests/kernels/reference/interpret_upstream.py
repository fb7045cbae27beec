# SPDX-License-Identifier: Apache-2.0
"""Run upstream's Triton kernels on the CPU, in Triton's interpreter.

A program of its own, because Triton decides at import whether it interprets, and because vLLM's CPU
build hides Triton and puts C++ functions in place of some kernels:

    TRITON_INTERPRET=1 python interpret_upstream.py CALLS ARGUMENTS RESULTS

CALLS is a JSON list of [function of `vllm.pre_ampere.kernels.upstream`, arguments that are no
tensors]; ARGUMENTS holds the tensors, safetensors named like "3.state" for call 3.
RESULTS receives, in the same way, the tensors afterwards (states are updated in place) and what the
calls returned, as "3.returned.0" and on.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice
from safetensors.torch import load_file, save_file
from triton.runtime import autotuner, interpreter


class CudaLikePlatform:
    """vLLM's platform, but for the two questions whose answers select the Triton kernels."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False

    def is_arch_support_pdl(self) -> bool:
        return False


class EagerGrid:
    """A kernel whose grid function sees torch tensors; the interpreter would hand it its own."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
            size = grid(arguments)
            self._kernel[size](**arguments)

        return launch


def accept_integer_masks() -> None:
    """The interpreter's masks may be integers, which its own load and store then refuse."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)

    builder.create_masked_load = lambda self, pointers, mask, *rest: load(
        self, pointers, as_bool(mask), *rest
    )
    builder.create_masked_store = lambda self, pointers, value, mask, *rest: store(
        self, pointers, value, as_bool(mask), *rest
    )


def cast_plain_integers() -> None:
    """A kernel's loop counter is a tensor to the compiler and a plain int here: `.to` becomes
    `tl.cast`, which takes both."""

    def visit_call(self: ast.NodeTransformer, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "to"):
            return node
        cast = ast.Attribute(ast.Name("tl", ast.Load()), "cast", ast.Load())
        return ast.copy_location(ast.Call(cast, [node.func.value, *node.args], node.keywords), node)

    interpreter.ASTTransformer.visit_Call = visit_call


def take_the_first_configuration() -> None:
    """There is nothing to time: every configuration computes the same."""
    autotuner.Autotuner.run = lambda self, *args, **kwargs: self.fn.run(
        *args, **kwargs, **self.configs[0].all_kwargs()
    )


def show_upstream_a_gpu() -> None:
    """Undo what vLLM's CPU build hides; the kernels' modules are not imported yet."""
    import vllm.platforms
    import vllm.triton_utils

    vllm.triton_utils.triton = triton
    vllm.triton_utils.tl = tl
    vllm.triton_utils.tldevice = tldevice
    vllm.platforms.current_platform = CudaLikePlatform(vllm.platforms.current_platform)

    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    causal_conv1d._causal_conv1d_fwd_kernel = EagerGrid(causal_conv1d._causal_conv1d_fwd_kernel)

    # Inside a kernel the interpreter replaces tl.exp, but not another module's name for it.
    from vllm.third_party.flash_linear_attention import ops
    from vllm.third_party.flash_linear_attention.ops import op

    aliases = {name: getattr(op, name) for name in ("exp", "exp2", "log", "log2")}
    for module in [m for name, m in sys.modules.items() if name.startswith(ops.__name__)]:
        for name, function in aliases.items():
            if getattr(module, name, None) is function:
                setattr(module, name, lambda x, name=name: getattr(tl, name)(x))


def main(calls_path: str, arguments_path: str, results_path: str) -> None:
    assert triton.knobs.runtime.interpret, "start this with TRITON_INTERPRET=1"
    accept_integer_masks()
    cast_plain_integers()
    take_the_first_configuration()
    show_upstream_a_gpu()
    from vllm.pre_ampere.kernels import upstream

    tensors = load_file(arguments_path)
    results = {}
    for number, (function, plain) in enumerate(json.loads(Path(calls_path).read_text())):
        prefix = f"{number}."
        given = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        returned = getattr(upstream, function)(**given, **plain)
        returned = returned if isinstance(returned, tuple) else (returned,)
        named = {f"returned.{place}": tensor for place, tensor in enumerate(returned)}
        # What was written in place is returned, too; the file takes no tensor twice.
        results |= {prefix + n: tensor.clone() for n, tensor in (given | named).items()}
    save_file(results, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
