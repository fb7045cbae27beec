# SPDX-License-Identifier: Apache-2.0
"""Data flows one way: which room of `vllm/pre_ampere/` may import which.

`ROOMS` is the table. Besides: no circles between modules, nothing of the product imports tests or
tools, and what must run without vLLM imports nothing of it. Imports inside functions and under
TYPE_CHECKING count like all others.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from checks import Finding, parse

ROOT = "vllm.pre_ampere"


@dataclass(frozen=True)
class Room:
    """Modules under one rule.

    Attributes:
        modules: pattern of their names, without `ROOT`.
        imports: patterns of the modules of ours that they may import, themselves aside.
        upstream: whether they may import upstream's vLLM.
    """

    modules: str
    imports: tuple[str, ...] = ()
    upstream: bool = True


_FACTS = ("devices", "environment")
_PARTS = ("attention*", "gdn*", "kernels*", "linear*")
_BOX = ("baseline", "emulation", "guards*")

# The first row that matches a module holds; a module without a row is a finding.
ROOMS = (
    Room("cuda_order", upstream=False),
    Room("devices", upstream=False),
    Room("environment", ("devices",), upstream=False),
    Room("kernels.reference*", upstream=False),
    Room("kernels.triton.turing_*", ("devices",), upstream=False),
    Room("kernels*", _FACTS),
    Room("attention*", (*_FACTS, "kernels*")),
    Room("gdn*", (*_FACTS, "kernels*")),
    Room("linear*", (*_FACTS, "kernels*")),
    Room("baseline", _FACTS),
    Room("emulation", _FACTS),
    Room("guards*", (*_FACTS, "baseline")),
    Room("upstream_patches", (*_FACTS, "guards*", "kernels*")),
    Room("guards*", (*_FACTS, "baseline")),
    Room("platform*", (*_FACTS, *_PARTS, *_BOX, "upstream_patches")),
    Room("", (*_FACTS, *_PARTS, "platform*", "upstream_patches")),
    Room("preflight*", (*_FACTS, *_PARTS, *_BOX, "platform*")),
    Room("proof"),
    Room("census", (*_FACTS, *_PARTS)),
    Room("cli*", ("*",)),
)


def check(files: Sequence[Path]) -> Iterator[Finding]:
    """Find imports against the table, and circles; `files` are all of the product."""
    modules = {_module(path): path for path in files}
    outside = _modules_outside()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imports = list(_imports(path, modules))
        graph[module] = {imported for imported, _ in imports if imported in modules}
        room = _room(module)
        if room is None:
            yield Finding(path, 1, f"{module} has no row in ROOMS: say what it may import")
            continue
        for imported, line in imports:
            if reason := _forbidden(room, module, imported, outside):
                yield Finding(path, line, reason)
    yield from _circle(graph, modules)


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules_outside() -> set[str]:
    """Names under which tests, tools and benchmarks can be imported."""
    folders = ("tests", "tools", "benchmarks")
    files = [file for folder in folders for file in Path(folder).glob("*.py")]
    packages = [file.parent for folder in folders for file in Path(folder).glob("*/__init__.py")]
    return {*folders, *(path.stem for path in [*files, *packages])}


def _room(module: str) -> Room | None:
    name = module.removeprefix(ROOT).removeprefix(".")
    return next((room for room in ROOMS if fnmatchcase(name, room.modules)), None)


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Each imported module with its line; relative imports are ruff's to refuse."""
    for node in ast.walk(parse(path)):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=str(source), names=names):
                for alias in names:
                    inner = f"{source}.{alias.name}"
                    yield inner if inner in modules else source, node.lineno


def _forbidden(room: Room, module: str, imported: str, outside: set[str]) -> str | None:
    if imported == ROOT or imported.startswith(f"{ROOT}."):
        name = imported.removeprefix(ROOT).removeprefix(".")
        if any(fnmatchcase(name, pattern) for pattern in (room.modules, *room.imports)):
            return None
        allowed = ", ".join(room.imports) or "nothing else of ours"
        return f"{module} may not import {imported}; it may import {allowed}"
    first = imported.partition(".")[0]
    if first == "vllm" and not room.upstream:
        return f"{module} must run without vLLM; it may not import {imported}"
    if first in outside:
        return f"the product may not import {imported}, which is no part of it"
    return None


def _circle(graph: Mapping[str, set[str]], modules: Mapping[str, Path]) -> Iterator[Finding]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        yield Finding(modules[circle[0]], 1, f"a circle of imports: {' <- '.join(circle)}")
