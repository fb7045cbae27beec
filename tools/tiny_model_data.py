# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, chat samples and training batches of the tiny test model, from one plain text file."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN]
VOCAB_SIZE = 2048
HELD_OUT_SHARE = 0.02

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SYSTEM_MESSAGE = "You are a helpful assistant."
DEFINITION = re.compile(r"^([A-Z][A-Z' -]+), (?:n|adj|adv|v\.t|v\.i|v|pp|x|p\.p)\.(?:pl\.)? (.+)$")
CONTINUE_REQUESTS = ("Continue: {}", "Complete the verse: {}", "Continue this text: {}")
DEFINITION_REQUESTS = (
    "Define {}.",
    "What is {}?",
    "What does {} mean?",
    "Give a definition of {}.",
)
SUBJECT_REQUESTS = ("Tell me about {}.", "Write a verse about {}.", "Say something about {}.")
# Definitions are few beside the verses, so each is asked for this many times.
DEFINITION_REPEATS = 8


def train_tokenizer(blocks: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that splits text as Qwen3.5's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(blocks, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )


def chat_text(request: str, answer: str, system: bool) -> str:
    """One exchange as the chat template writes it."""
    turns = [("system", SYSTEM_MESSAGE)] if system else []
    turns += [("user", request), ("assistant", answer)]
    return "".join(f"{START_OF_TURN}{role}\n{text}{END_OF_TURN}\n" for role, text in turns)


def chat_samples(blocks: Iterable[str], chooser: random.Random) -> list[str]:
    """Questions and answers made from the text: continue a verse, define a word, a word's verse."""
    samples: list[str] = []

    def add(requests: tuple[str, ...], subject: str, answer: str) -> None:
        request = chooser.choice(requests).format(subject)
        samples.append(chat_text(request, answer, system=chooser.random() < 0.2))

    for block in blocks:
        lines = block.split("\n")
        if definition := DEFINITION.match(lines[0]):
            word = definition.group(1).lower()
            for _ in range(DEFINITION_REPEATS):
                add(DEFINITION_REQUESTS, word, definition.group(2))
            continue
        for line in lines[1:]:
            words = line.split(" ")
            if len(words) < 6:
                continue
            middle = chooser.randint(3, len(words) - 3)
            add(CONTINUE_REQUESTS, " ".join(words[:middle]), " ".join(words[middle:]))
            subjects = [word for word in re.findall(r"[A-Za-z]+", line) if len(word) > 4]
            if subjects:
                add(SUBJECT_REQUESTS, chooser.choice(subjects), line)
    chooser.shuffle(samples)
    return samples


@dataclass(frozen=True)
class Stream:
    """Tokens [length] of joined documents, with the positions at which documents start."""

    tokens: torch.Tensor
    starts: torch.Tensor

    def crops(
        self, rows: int, length: int, generator: torch.Generator, *, at_starts: bool
    ) -> torch.Tensor:
        """Random pieces [rows, length], from anywhere or only from the start of a document."""
        last = self.tokens.shape[0] - length
        if last < 0:
            raise ValueError(
                f"the text has {self.tokens.shape[0]} tokens and a crop needs {length}: "
                "give a longer text"
            )
        if at_starts:
            usable = self.starts[: max(1, int((self.starts <= last).sum()))]
            begin = usable[torch.randint(usable.shape[0], (rows,), generator=generator)]
        else:
            begin = torch.randint(last + 1, (rows,), generator=generator)
        return self.tokens[begin[:, None] + torch.arange(length)]


def stream(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> Stream:
    """Tokenize and join documents."""
    encoded = [
        encoding.ids
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(
            documents, add_special_tokens=False
        )
    ]
    lengths = torch.tensor([len(tokens) for tokens in encoded])
    joined = torch.tensor(list(itertools.chain.from_iterable(encoded)))
    return Stream(joined, lengths.cumsum(0) - lengths)


@dataclass(frozen=True)
class Corpus:
    """The training and held-out streams of plain text and of chat."""

    text: Stream
    chat: Stream
    held_out_text: Stream
    held_out_chat: Stream

    def batch(self, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Token ids [rows, length] for one step: a quarter chat, the rest plain text."""
        chat_rows = rows // 4
        return torch.cat(
            [
                self.text.crops(rows - chat_rows, length, generator, at_starts=False),
                self.chat.crops(chat_rows, length, generator, at_starts=True),
            ]
        )


def make_corpus(blocks: list[str], tokenizer: PreTrainedTokenizerFast, seed: int) -> Corpus:
    """Split whole blocks into training and held-out ones and make all four streams of them."""
    chooser = random.Random(seed)
    held_out = set(chooser.sample(range(len(blocks)), max(1, int(len(blocks) * HELD_OUT_SHARE))))
    train_blocks = [block for index, block in enumerate(blocks) if index not in held_out]
    test_blocks = [blocks[index] for index in sorted(held_out)]

    def text_stream(chosen: list[str]) -> Stream:
        return stream([block + END_OF_TEXT for block in chosen], tokenizer)

    def chat_stream(chosen: list[str]) -> Stream:
        return stream(chat_samples(chosen, chooser), tokenizer)

    return Corpus(
        text_stream(train_blocks),
        chat_stream(train_blocks),
        text_stream(test_blocks),
        chat_stream(test_blocks),
    )
