# SPDX-License-Identifier: Apache-2.0
"""Which cards a library holds GPU code for, read from the file.

nvcc puts GPU code into the section `.nv_fatbin` of a library: a row of fat binaries, each a header
and its images, a cubin or PTX with the architecture in a header of its own. Only these headers are
read, so a library of a gigabyte takes milliseconds and neither CUDA nor a card. The layout is not
documented by NVIDIA; it is checked against `cuobjdump` in the tests.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm.pre_ampere.devices import Capability

_ELF_MAGIC = b"\x7fELF\x02\x01"
_SECTION = b".nv_fatbin"
_FAT_BINARY_MAGIC = 0xBA55ED50
# Magic, version, size of this header, size of the images after it.
_FAT_BINARY = struct.Struct("<IHHQ")
# Kind, version, size of this header, size of the image; the architecture, as 75, stands at byte 28.
_IMAGE = struct.Struct("<HHIQ12xI")
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True)
class GpuCode:
    """The architectures a library holds code for.

    Attributes:
        cubins: for which it is assembled.
        ptx: for which it can be assembled by the driver.
    """

    cubins: frozenset[Capability]
    ptx: frozenset[Capability]

    def runs_on(self, capability: Capability) -> bool:
        """Whether a card of this capability can run it.

        A cubin runs on its own major capability from its minor one on, PTX on any capability that
        is not older.
        """
        return any(
            cubin[0] == capability[0] and cubin[1] <= capability[1] for cubin in self.cubins
        ) or any(ptx <= capability for ptx in self.ptx)

    def __or__(self, other: "GpuCode") -> "GpuCode":
        return GpuCode(self.cubins | other.cubins, self.ptx | other.ptx)

    def __str__(self) -> str:
        names = [f"sm_{major}{minor}" for major, minor in sorted(self.cubins)]
        names += [f"PTX {major}.{minor}" for major, minor in sorted(self.ptx)]
        return ", ".join(names) if names else "no GPU code"


NO_CODE = GpuCode(frozenset(), frozenset())


class UnreadableLibraryError(ValueError):
    """The file is no library that this module can read; the message says why."""


def read_gpu_code(library: Path) -> GpuCode:
    """The GPU code in a shared library; `NO_CODE` where it holds none.

    Raises:
        UnreadableLibraryError: no 64-bit little-endian ELF file, or fat binaries of another layout.
        OSError: the file cannot be read.
    """
    with library.open("rb") as file:
        if file.read(len(_ELF_MAGIC)) != _ELF_MAGIC:
            raise UnreadableLibraryError(f"{library.name} is no 64-bit ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                section = _section(data)
                images = () if section is None else tuple(_images(data, *section))
            except (struct.error, IndexError):
                raise UnreadableLibraryError(f"{library.name} is cut short") from None
    return GpuCode(
        frozenset(capability for kind, capability in images if kind == _CUBIN),
        frozenset(capability for kind, capability in images if kind == _PTX),
    )


def _section(data: mmap.mmap) -> tuple[int, int] | None:
    """Offset and size of `.nv_fatbin` (System V ABI, Elf64_Ehdr and Elf64_Shdr)."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)

    def header(index: int) -> tuple[int, int, int]:
        name, offset, size = struct.unpack_from("<I20xQQ", data, table + index * entry_size)
        return name, offset, size

    _, names, _ = header(names_index)
    for index in range(count):
        name, offset, size = header(index)
        start = names + name
        if data[start : start + len(_SECTION) + 1] == _SECTION + b"\0":
            return offset, size
    return None


def _images(data: mmap.mmap, offset: int, size: int) -> Iterator[tuple[int, Capability]]:
    """Kind and capability of each image in a section."""
    position, end = offset, offset + size
    while position + _FAT_BINARY.size <= end:
        magic, _, header_size, images_size = _FAT_BINARY.unpack_from(data, position)
        if magic != _FAT_BINARY_MAGIC:
            # Fat binaries are padded to multiples of 8 bytes.
            if any(data[position : position + 8]):
                raise UnreadableLibraryError(f"no fat binary at byte {position}")
            position += 8
            continue
        image = position + header_size
        position = image + images_size
        while image < position:
            kind, _, image_header_size, image_size, architecture = _IMAGE.unpack_from(data, image)
            yield kind, divmod(architecture, 10)
            image += image_header_size + image_size
