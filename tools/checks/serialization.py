# SPDX-License-Identifier: Apache-2.0
"""Nothing is read that can run code: no pickles, under any of their names."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from checks import Finding, dotted_name, parse

_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
_FUNCTIONS = {"numpy.load", "np.load", "pandas.read_pickle", "torch.load"}
_REMEDY = "can run code from the file that it reads; use JSON or safetensors"


def check(files: Sequence[Path]) -> Iterator[Finding]:
    """Find imports of pickling modules, and functions of other libraries that unpickle."""
    for path in files:
        for node in ast.walk(parse(path)):
            for name in _used(node):
                yield Finding(path, getattr(node, "lineno", 1), f"{name} {_REMEDY}")


def _used(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names if alias.name.split(".")[0] in _MODULES)
        case ast.ImportFrom(module=str(module), names=names):
            if module.split(".")[0] in _MODULES:
                yield module
            yield from (name for alias in names if (name := f"{module}.{alias.name}") in _FUNCTIONS)
        case ast.Attribute():
            read = dotted_name(node)
            if read is not None and read in _FUNCTIONS:
                yield read
