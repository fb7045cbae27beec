# SPDX-License-Identifier: Apache-2.0
"""The prompts of the engine tests: ten lengths, cut from one public-domain text."""

from functools import cache
from pathlib import Path

from engine_process import TINY_MODEL

# The reference's range, with neighbours of the chunk (64) and of block and batch sizes.
LENGTHS = (19, 64, 130, 257, 511, 1543, 3071, 4097, 8190, 13004)


@cache
def text_tokens() -> list[int]:
    from transformers import AutoTokenizer

    text = (Path(__file__).parent / "data" / "genesis.txt").read_text()
    return list(AutoTokenizer.from_pretrained(TINY_MODEL)(text)["input_ids"])


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """One prompt a length, each from another place of the text."""
    tokens = text_tokens()
    return [tokens[31 * place : 31 * place + length] for place, length in enumerate(lengths)]
