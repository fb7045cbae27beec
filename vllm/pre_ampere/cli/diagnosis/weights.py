# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint's folder holds the weights that an engine would load.

Only the files' headers are read. A fault names the folder without its path, which is not to leave
the machine.
"""

import json
from pathlib import Path

# Formats of upstream's --load-format that take safetensors from the checkpoint's own folder.
_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")


def missing(folder: Path, load_format: str) -> str | None:
    """Which weights are not there; None where all are.

    Args:
        folder: with the checkpoint's config.json.
        load_format: upstream's, of the engine; one that takes its weights elsewhere is not checked.
    """
    if load_format not in _SAFETENSORS_FORMATS:
        return None
    name = f"the folder {folder.resolve().name}"
    if (fault := _fault_of_index(folder)) is not None:
        return f"{name}: {fault}"
    if _files(folder, "safetensors"):
        return None
    if pickles := _pickles(folder):
        more = f" and {len(pickles) - 1} more" if len(pickles) > 1 else ""
        return (
            f"{name} has pickled weights ({pickles[0]}{more}) and no *.safetensors; only "
            "safetensors are supported, for a pickle can run code: download or convert to those"
        )
    return f"{name} has no weights: no file *.safetensors; download those of the checkpoint into it"


def unreadable(folder: Path, load_format: str) -> str | None:
    """The first file that is no whole safetensors file; None where all are. Arguments as above.

    A download that was cut off is such a file, and so is the pointer that Git leaves without its LFS.
    """
    from safetensors import SafetensorError, safe_open

    if load_format not in _SAFETENSORS_FORMATS:
        return None
    for name in _files(folder, "safetensors"):
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            # Without the path, which a system error's text holds.
            reason = getattr(error, "strerror", None) or error
            where = f"the folder {folder.resolve().name}"
            return f"{where}: {name} cannot be read ({reason}); download it again"
    return None


def _fault_of_index(folder: Path) -> str | None:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return None
    try:
        shards = sorted({str(s) for s in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{index.name} is no index of shards; download it again"
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if not absent:
        return None
    return (
        f"{absent[0]} is not there, and {len(absent)} of the {len(shards)} shards that {index.name} "
        "names are missing; download them"
    )


def _files(folder: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*.{suffix}") if path.is_file())


def _pickles(folder: Path) -> list[str]:
    """Those that upstream takes for weights: not an optimizer's state, for one."""
    from vllm.model_executor.model_loader.weight_utils import filter_files_not_needed_for_inference

    files: list[str] = filter_files_not_needed_for_inference(
        [str(folder / name) for suffix in ("bin", "pt") for name in _files(folder, suffix)]
    )
    return [Path(file).name for file in files]
