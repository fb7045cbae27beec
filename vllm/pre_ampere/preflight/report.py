# SPDX-License-Identifier: Apache-2.0
"""What preflight found: a finding for each kernel that a launch needs, and how they compare."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Lowering(StrEnum):
    """How matrix products of Triton kernels are compiled."""

    TRITON = "Triton's own"
    TENSOR_CORES = "tensor cores"


class Finding(BaseModel):
    """One compiled kernel.

    Attributes:
        launch: the launch that needs it; see `launches`.
        kernel: the kernel's name.
        configuration: warps and tuned tile sizes, such as "4 warps, BK=64"; a number follows where
            the launch needs several specialisations of the kernel.
        shared_memory: bytes a block.
        shared_memory_limit: bytes a block of the card can have.
        registers: a thread.
        stack: bytes a thread, of spilled registers and of arrays that registers cannot hold.
        products: matrix products in its source, before unrolling.
        tensor_core_instructions: mma instructions in its PTX.
        fma_instructions: scalar fp32 or fp16 multiply-adds in its PTX, where it has products.
        failure: why it cannot be compiled or launched; None where it can.
        compile_seconds: 0 where another launch of the same run had compiled it.
    """

    model_config = ConfigDict(frozen=True)

    launch: str
    kernel: str
    configuration: str
    shared_memory: int
    shared_memory_limit: int
    registers: int
    stack: int
    products: int
    tensor_core_instructions: int
    fma_instructions: int
    failure: str | None = None
    compile_seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the other findings of its table."""
        return self.launch, self.kernel, self.configuration

    @property
    def over_the_limit(self) -> bool:
        """Whether a block of the card has too little shared memory for it."""
        return self.shared_memory > self.shared_memory_limit

    @property
    def scalar_product(self) -> bool:
        """Whether it computes matrix products without any tensor-core instruction."""
        return self.products > 0 and self.tensor_core_instructions == 0


class Table(BaseModel):
    """The findings for one model on one card, in one lowering.

    Attributes:
        model: name and tensor-parallel size.
        architecture: such as "sm75".
        lowering: how matrix products were compiled.
        triton: Triton's release; other compilers need other registers.
        complete: whether it holds every configuration that autotuning would try, of the launches
            that it would try some of; else what is launched.
        findings: in the order of a step.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    architecture: str
    lowering: Lowering
    triton: str
    complete: bool
    findings: tuple[Finding, ...]

    @property
    def name(self) -> tuple[str, str, str, bool]:
        """What tells it from other tables."""
        return self.model, self.architecture, self.lowering, self.complete

    @property
    def title(self) -> str:
        """For headings."""
        scope = "all configurations" if self.complete else "as launched"
        return f"{self.model} on {self.architecture}, {self.lowering} lowering, {scope}"

    @property
    def unlaunchable(self) -> tuple[Finding, ...]:
        """Findings over the card's limit or not compiled at all."""
        return tuple(f for f in self.findings if f.over_the_limit or f.failure is not None)


class Results(BaseModel):
    """What a results file holds."""

    model_config = ConfigDict(frozen=True)

    tables: tuple[Table, ...]

    def table(self, name: tuple[str, str, str, bool]) -> Table | None:
        """The table of that `Table.name`."""
        return next((table for table in self.tables if table.name == name), None)

    def updated(self, tables: Iterable[Table]) -> "Results":
        """With these tables in place of those of the same names, without compile times.

        Compile times depend on the machine and would change the file each time.
        """
        merged = {table.name: table for table in self.tables}
        for table in tables:
            findings = tuple(f.model_copy(update={"compile_seconds": 0.0}) for f in table.findings)
            merged[table.name] = table.model_copy(update={"findings": findings})
        return Results(tables=tuple(merged[name] for name in sorted(merged)))


def differences(recorded: Table, found: Table) -> Sequence[str]:
    """What differs between two tables of the same name, a sentence each; empty where they agree.

    Compile times are not compared.
    """
    old = {finding.key: finding for finding in recorded.findings}
    new = {finding.key: finding for finding in found.findings}
    said = [f"{_label(key)} is new" for key in new.keys() - old.keys()]
    said += [f"{_label(key)} is gone" for key in old.keys() - new.keys()]
    compared = set(Finding.model_fields) - {"compile_seconds"}
    for key in sorted(old.keys() & new.keys()):
        for field in sorted(compared):
            was, now = getattr(old[key], field), getattr(new[key], field)
            if was != now:
                said.append(f"{_label(key)}: {field.replace('_', ' ')} was {was}, is {now}")
    return sorted(said)


def _label(key: tuple[str, str, str]) -> str:
    launch, kernel, configuration = key
    return f"{kernel} ({configuration}) of {launch}"
