# SPDX-License-Identifier: Apache-2.0
"""What `make lint` checks beyond what ready-made tools do; `tools/check.py` runs one of them.

A check is a module of this folder with a function `check`, which takes paths relative to the
repository's root and yields what is wrong with them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Finding:
    """Something wrong: where, and what to do about it."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file of Python."""
    return ast.parse(path.read_text(), str(path))


def nodes_by_function(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the dotted name of the function or class around it, "" at module level."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        scope, node = waiting.pop()
        yield scope, node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = f"{scope}.{node.name}".removeprefix(".")
        waiting.extend((scope, child) for child in ast.iter_child_nodes(node))


def dotted_name(node: ast.AST) -> str | None:
    """`a.b.c` for the expression that reads so; None for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
