# SPDX-License-Identifier: Apache-2.0
"""Prompts of given lengths, drawn from a text; the same for the same seed."""

import random
import re
from collections.abc import Sequence
from typing import Protocol

# Abraham Lincoln, Gettysburg, 1863 (public domain).
SAMPLE_TEXT = """
Four score and seven years ago our fathers brought forth on this continent, a new nation,
conceived in Liberty, and dedicated to the proposition that all men are created equal. Now we are
engaged in a great civil war, testing whether that nation, or any nation so conceived and so
dedicated, can long endure. We are met on a great battle-field of that war. We have come to
dedicate a portion of that field, as a final resting place for those who here gave their lives
that that nation might live. It is altogether fitting and proper that we should do this. But, in a
larger sense, we can not dedicate, we can not consecrate, we can not hallow this ground. The brave
men, living and dead, who struggled here, have consecrated it, far above our poor power to add or
detract. The world will little note, nor long remember what we say here, but it can never forget
what they did here. It is for us the living, rather, to be dedicated here to the unfinished work
which they who fought here have thus far so nobly advanced.
"""


class Tokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


def draw_prompts(
    tokenizer: Tokenizer | None,
    vocabulary_size: int,
    lengths: Sequence[int],
    text: str = SAMPLE_TEXT,
) -> list[list[int]]:
    """One prompt of each length; no two begin alike.

    Args:
        tokenizer: None draws token ids at random, which any model takes and none continues well.
        vocabulary_size: token ids lie below it.
        lengths: in tokens.
        text: its sentences are put in a new order for each prompt, and repeated until it is long
            enough.

    Returns:
        Token ids, one list a prompt.
    """
    prompts = []
    for index, length in enumerate(lengths):
        order = random.Random(f"{index} {length}")
        if tokenizer is None:
            prompts.append([order.randrange(vocabulary_size) for _ in range(length)])
        else:
            prompts.append(_shuffled_sentences(tokenizer, text, length, order))
    return prompts


def _shuffled_sentences(
    tokenizer: Tokenizer, text: str, length: int, order: random.Random
) -> list[int]:
    sentences = re.split(r"(?<=[.!?]) +", " ".join(text.split()))
    tokens: list[int] = []
    while len(tokens) < length:
        order.shuffle(sentences)
        tokens += tokenizer.encode(f"{order.randrange(1000)}. " + " ".join(sentences) + " ")
    return tokens[:length]
