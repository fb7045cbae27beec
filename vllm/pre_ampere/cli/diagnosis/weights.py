# SPDX-License-Identifier: Apache-2.0
"""Which weights of a checkpoint's folder an engine would load, and whether they are there and whole.

Upstream's loader chooses the files. Of safetensors only the headers are read, and of pickles nothing
but whether the file is a whole one. A fault names the folder without its path, which is not to leave
the machine.
"""

import itertools
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Formats of upstream's --load-format that take weights from the checkpoint's own folder as they are.
_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt")
# How files begin that torch.save writes, now and until PyTorch 1.5.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


@dataclass(frozen=True)
class Weights:
    """The files that upstream's loader takes.

    Attributes:
        files: their names, sorted; none where it would end with an error.
        pickled: they are pickles, and no safetensors.
    """

    files: tuple[str, ...]
    pickled: bool


def taken(folder: Path, load_format: str) -> Weights | None:
    """Ask upstream's loader which files it takes.

    Args:
        folder: with the checkpoint's config.json.
        load_format: upstream's, of the engine.

    Returns:
        None for a format that takes its weights elsewhere or not as they are.
    """
    if load_format.lower() not in _FORMATS:
        return None
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    try:
        _, paths, safetensors, _ = loader._prepare_weights(
            str(folder), None, None, fall_back_to_pt=True, allow_patterns_overrides=None
        )
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        # There are none, or the index of safetensors names one that is not there, or is no index.
        return Weights((), pickled=load_format.lower() == "pt")
    names = sorted(Path(path).name for path in paths if Path(path).is_file())
    return Weights(tuple(names), pickled=not safetensors)


def missing(folder: Path, load_format: str) -> str | None:
    """Which weights are not there; None where all are, or are not looked for. Arguments as above."""
    found = taken(folder, load_format)
    if found is None:
        return None
    name = f"the folder {folder.resolve().name}"
    if (fault := _fault_of_index(folder, found)) is not None:
        return f"{name}: {fault}"
    if found.files:
        return None
    there = [*_files(folder, "safetensors"), *_pickles(folder)]
    if not there:
        return (
            f"{name} has no weights: no file *.safetensors, *.bin or *.pt; download those of the "
            "checkpoint into it"
        )
    others = ((each, taken(folder, each)) for each in ("auto", "pt"))
    loading = next((each for each, other in others if other and other.files), None)
    remedy = f"pass --load-format {loading}" if loading else "convert them to safetensors"
    return (
        f"{name} has {summary(there)}, and nothing that --load-format {load_format} loads; {remedy}"
    )


def unreadable(folder: Path, load_format: str) -> str | None:
    """The first file that is not whole; None where all are, or are not looked for. Arguments as above.

    A download that was cut off is such a file, and so is the pointer that Git leaves without its LFS.
    All safetensors are looked at: upstream reads the headers of more than it takes.
    """
    found = taken(folder, load_format)
    if found is None:
        return None
    pickles = found.files if found.pickled else ()
    faults = itertools.chain(
        ((name, _fault_of_safetensors(folder / name)) for name in _files(folder, "safetensors")),
        ((name, _fault_of_pickle(folder / name)) for name in pickles),
    )
    for name, fault in faults:
        if fault is not None:
            where = f"the folder {folder.resolve().name}"
            return f"{where}: {name} cannot be read ({fault}); download it again"
    return None


def summary(names: Sequence[str]) -> str:
    """The first of some files, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _fault_of_index(folder: Path, found: Weights) -> str | None:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

    index = folder / (WEIGHTS_INDEX_NAME if found.pickled else SAFE_WEIGHTS_INDEX_NAME)
    if not index.is_file():
        return None
    try:
        shards = sorted({str(s) for s in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # Upstream reads no index of pickles.
        return None if found.pickled else f"{index.name} is no index of shards; download it again"
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if not absent or (found.pickled and set(found.files).isdisjoint(shards)):
        return None
    return (
        f"{absent[0]} is not there, and {len(absent)} of the {len(shards)} shards that {index.name} "
        "names are missing; download them"
    )


def _fault_of_safetensors(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            return None
    except (SafetensorError, OSError) as error:
        # Without the path, which a system error's text holds.
        return str(getattr(error, "strerror", None) or error)


def _fault_of_pickle(path: Path) -> str | None:
    """Nothing is unpickled: an archive is whole where its directory, which ends it, is there."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_ZIP))
        if start == _ZIP:
            return None if zipfile.is_zipfile(path) else "an archive without its end"
    except OSError as error:
        return error.strerror or "no reason was given"
    return None if start.startswith(_PICKLE) else "not what torch.save writes"


def _files(folder: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*.{suffix}") if path.is_file())


def _pickles(folder: Path) -> list[str]:
    """Those that upstream takes for weights: not an optimizer's state, for one."""
    from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference

    files: list[str] = filter_files_not_needed_for_inference(
        [str(folder / name) for suffix in ("bin", "pt") for name in _files(folder, suffix)]
    )
    return [Path(file).name for file in files]
