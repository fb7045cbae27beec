# SPDX-License-Identifier: Apache-2.0
"""Write the training text of the tiny test model from two Debian packages.

The King James Bible (1611) comes from `bible-kjv` with `bible-kjv-text`, The Devil's Dictionary
(Ambrose Bierce, 1911) from `dict-devil`; both texts are in the public domain. The result is one
file of blocks parted by empty lines: a chapter with its heading on the first line and then one
verse a line, or one dictionary entry with one paragraph a line. Two things are left out: the
dictionary package's closing line of letters, and entries that deride people for their race.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

DICTIONARY = Path("/usr/share/dictd/devil.dict.dz")
WHOLE_BIBLE = "Genesis1:1-Revelation22:21"
# Wider than the longest verse, so that the program never breaks one.
COLUMNS = "20000"

VERSE = re.compile(r"^ +\d+ (.*)$")
# The second form marks an entry that is an abbreviation, a letter or a title without its class.
ENTRY = re.compile(r"^[A-Z][A-Z' -]+(?:\.$|, |\. )")
DERISION = re.compile(r"\b(?:nigger|negro|mulatto)", re.IGNORECASE)
CLOSING_LINE = "abcdefghijklmnopqrstuvwxyz"


def bible_blocks(printed: str) -> list[str]:
    """Turn the output of `bible -l` into one block a chapter, without the verse numbers."""
    blocks: list[list[str]] = []
    for line in printed.splitlines():
        verse = VERSE.match(line)
        if verse and blocks:
            blocks[-1].append(verse.group(1).strip())
        elif line.strip():
            blocks.append([line.strip()])
    return ["\n".join(block) for block in blocks]


def dictionary_blocks(printed: str) -> list[str]:
    """Turn the dictionary's wrapped text into one block an entry, one paragraph a line.

    Verse (indented lines) keeps its lines; prose is joined. Everything before the first entry
    (the distribution notice and the preface) is left out.
    """
    blocks: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", printed):
        lines = [line.rstrip() for line in paragraph.splitlines() if line.strip()]
        if not lines or lines[0].strip() == CLOSING_LINE:
            continue
        is_entry = ENTRY.match(lines[0]) is not None
        if not blocks and not (is_entry and lines[0].startswith("ABASEMENT")):
            continue
        # An indented first line alone opens a paragraph of prose; two open a stanza.
        if all(line.startswith("    ") for line in lines[:2]) and not is_entry:
            text = "\n".join(line.strip() for line in lines)
        else:
            text = " ".join(line.strip() for line in lines)
        text = re.sub(r"[ \t]+", " ", text.replace("_", ""))
        if is_entry:
            blocks.append([text])
        else:
            blocks[-1].append(text)
    entries = ["\n".join(block) for block in blocks]
    return [entry for entry in entries if not DERISION.search(entry)]


def main(
    output: Annotated[Path, typer.Option(help="The text file to write.")],
) -> None:
    """Write the training text and print its sha256."""
    if shutil.which("bible") is None or not DICTIONARY.exists():
        raise typer.BadParameter(
            "the Debian packages bible-kjv, bible-kjv-text and dict-devil are not all installed: "
            "run `apt-get install bible-kjv dict-devil`"
        )
    bible = subprocess.run(
        ["bible", "-l", COLUMNS, WHOLE_BIBLE],
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    ).stdout
    dictionary = gzip.decompress(DICTIONARY.read_bytes()).decode("latin-1")
    blocks = bible_blocks(bible) + dictionary_blocks(dictionary)
    text = "\n\n".join(blocks) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    print(f"{output}: {len(text)} characters, {len(blocks)} blocks, sha256 {digest}")


if __name__ == "__main__":
    typer.run(main)
