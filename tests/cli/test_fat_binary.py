# SPDX-License-Identifier: Apache-2.0
"""Reading a library's GPU code, against NVIDIA's own cuobjdump."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from vllm.pre_ampere.cli.diagnosis.fat_binary import (
    NO_CODE,
    GpuCode,
    UnreadableLibraryError,
    read_gpu_code,
)

DATA = Path(__file__).parent / "data"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def as_cuobjdump_sees(library: Path) -> GpuCode:
    listed = subprocess.run(
        [str(CUOBJDUMP), "--list-elf", "--list-ptx", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.findall(r"\.sm_(\d+)(\d)\.(cubin|ptx)$", listed, re.MULTILINE)
    cubins = frozenset((int(a), int(b)) for a, b, kind in found if kind == "cubin")
    return GpuCode(cubins, frozenset((int(a), int(b)) for a, b, kind in found if kind == "ptx"))


@pytest.mark.parametrize("name", ["fatbinary.so", "nvcc.so"])
def test_the_code_is_what_cuobjdump_lists(name: str) -> None:
    code = read_gpu_code(DATA / name)
    assert code == as_cuobjdump_sees(DATA / name)
    assert (7, 5) in code.cubins
    assert code.ptx


def test_compressed_images_and_several_fat_binaries_are_read() -> None:
    code = read_gpu_code(DATA / "fatbinary.so")
    assert str(code) == "sm_70, sm_75, sm_80, PTX 7.5"


def test_a_library_without_gpu_code_holds_none() -> None:
    library = next(Path("/").glob("lib*/**/libm.so.6"))
    assert read_gpu_code(library) == NO_CODE
    assert str(NO_CODE) == "no GPU code"


@pytest.mark.parametrize(
    ("cubins", "ptx", "runs"),
    [
        ({(7, 0)}, set(), {(7, 0), (7, 2), (7, 5)}),
        ({(7, 5)}, set(), {(7, 5)}),
        ({(8, 0)}, set(), {(8, 0), (8, 6)}),
        (set(), {(7, 0)}, {(7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (9, 0)}),
        (set(), {(8, 0)}, {(8, 0), (8, 6), (9, 0)}),
        ({(9, 0)}, {(7, 5)}, {(7, 5), (8, 0), (8, 6), (9, 0)}),
    ],
)
def test_what_runs_where(
    cubins: set[tuple[int, int]], ptx: set[tuple[int, int]], runs: set[tuple[int, int]]
) -> None:
    cards = [(7, 0), (7, 2), (7, 5), (8, 0), (8, 6), (9, 0)]
    code = GpuCode(frozenset(cubins), frozenset(ptx))
    assert {card for card in cards if code.runs_on(card)} == runs


def test_files_that_are_no_library_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(UnreadableLibraryError, match=r"text\.so is no 64-bit ELF file"):
        read_gpu_code(text)


@pytest.mark.parametrize("keep", [60, 200])
def test_a_library_that_is_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    library = tmp_path / "short.so"
    library.write_bytes((DATA / "nvcc.so").read_bytes()[:keep])
    with pytest.raises(UnreadableLibraryError, match=r"short\.so is cut short"):
        read_gpu_code(library)


def test_another_layout_is_not_guessed_at(tmp_path: Path) -> None:
    library = tmp_path / "other.so"
    shutil.copy(DATA / "fatbinary.so", library)
    content = library.read_bytes().replace(b"\x50\xed\x55\xba", b"\x51\xed\x55\xba")
    library.write_bytes(content)
    with pytest.raises(UnreadableLibraryError, match="no fat binary at byte"):
        read_gpu_code(library)
