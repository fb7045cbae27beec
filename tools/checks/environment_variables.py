# SPDX-License-Identifier: Apache-2.0
"""Environment variables are read in one file, and each is documented.

`vllm/pre_ampere/environment.py` is the one place; `docs/environment.md` has a row for each variable
declared there.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from checks import Finding, dotted_name, nodes_by_function, parse

TABLE = Path("vllm/pre_ampere/environment.py")
DOCUMENT = Path("docs/environment.md")

# (file, function around it) -> why it looks at the environment itself.
ALLOWED = {
    ("vllm/pre_ampere/devices.py", "driver_order"): "hands its own environment to a child process",
}

_ACCESS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
_OURS = re.compile(r"VLLM_(PRE_AMPERE|SM70)_[A-Z0-9_]+")
_ROW = re.compile(r"^\| `([A-Za-z0-9_]+)`")


def check(files: Sequence[Path]) -> Iterator[Finding]:
    """Find readers of the environment outside the table, and rows that differ from the table."""
    for path in files:
        if path != TABLE:
            yield from _accesses(path)
    yield from _documentation()


def _accesses(path: Path) -> Iterator[Finding]:
    unused = {function for file, function in ALLOWED if file == path.as_posix()}
    for scope, node in nodes_by_function(parse(path)):
        line = getattr(node, "lineno", 1)
        if _reads_environment(node):
            unused.discard(scope)
            if (path.as_posix(), scope) not in ALLOWED:
                yield Finding(path, line, f"ask the environment through a Variable of {TABLE}")
        match node:
            case ast.Constant(value=str(text)) if _OURS.fullmatch(text):
                yield Finding(path, line, f"take the name {text} from {TABLE}")
    for function in sorted(unused):
        yield Finding(path, 1, f"{function} no longer looks at it: remove it from ALLOWED")


def _reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name in _ACCESS for alias in names)
        case ast.Attribute():
            return dotted_name(node) in {f"os.{name}" for name in _ACCESS}
    return False


def _documentation() -> Iterator[Finding]:
    declared: dict[str, int] = {}
    for node in ast.walk(parse(TABLE)):
        match node:
            case ast.Call(func=ast.Name("Variable"), args=[ast.Constant(str(name)), *_]):
                declared[name] = node.lineno
    documented: dict[str, int] = {}
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else []
    for number, line in enumerate(lines, start=1):
        if row := _ROW.match(line):
            documented[row[1]] = number
    for name in declared.keys() - documented.keys():
        yield Finding(TABLE, declared[name], f"{name} has no row in {DOCUMENT}")
    for name in documented.keys() - declared.keys():
        yield Finding(DOCUMENT, documented[name], f"{name} is not in {TABLE}")
