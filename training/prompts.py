"""Held-out prompts: pieces of held-out files that begin where a reader would begin."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from slipstream.bundled import Prompt
from slipstream.training.corpus import SourceFile, load

MIN_TOKENS = 48
MAX_TOKENS = 96

# A class, a function, a method or a docstring that opens a file.
_BEGINNING = re.compile(r'\A[rR]?"""|^(?:class |def |async def |    def |    async def )', re.MULTILINE)


def _rank(*key: object) -> int:
    """A number that depends only on ``key``: a fixed draw, the same in every run."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


def _cut(text: str, length: int, tokenizer: Tokenizer) -> str | None:
    """The first ``length`` tokens of ``text``, if they are text that has just as many tokens."""
    ids = tokenizer.encode(text[: 16 * length]).ids[:length]
    piece = tokenizer.decode(ids)
    return piece if len(ids) == length and tokenizer.encode(piece).ids == ids else None


def candidates(file: SourceFile, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Yield the file's prompts, best first (in the order of a fixed draw), without an id."""
    starts = [match.start() for match in _BEGINNING.finditer(file.text)]
    for start in sorted(starts, key=lambda start: _rank(file.name, start)):
        length = MIN_TOKENS + _rank("length", file.name, start) % (MAX_TOKENS - MIN_TOKENS + 1)
        text = _cut(file.text[start:], length, tokenizer)
        if text is not None:
            line = file.text.count("\n", 0, start) + 1
            yield Prompt(id="", source=file.name, line=line, num_tokens=length, text=text)


def choose(files: list[SourceFile], tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Choose ``count`` prompts, the files in turn, so that as many files as possible have one."""
    queues = [candidates(file, tokenizer) for file in sorted(files, key=lambda file: _rank(file.name))]
    in_turns = (prompt for turn in zip_longest(*queues) for prompt in turn if prompt is not None)
    chosen = list(islice(in_turns, count))
    if len(chosen) < count:
        raise ValueError(f"only {len(chosen)} prompts of at least {MIN_TOKENS} tokens, {count} wanted")
    return chosen


def main(
    corpus: Annotated[Path, typer.Option(help="Folder that the corpus command wrote.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    out: Annotated[Path, typer.Option(help="The prompts, one JSON object a line.")],
    count: Annotated[int, typer.Option(help="Number of prompts.")] = 64,
) -> None:
    """Choose prompts from the held-out files."""
    held_out = [file for file in load(corpus) if file.split == "heldout"]
    backend: Tokenizer = AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer
    chosen = choose(held_out, backend, count)
    with out.open("w", encoding="utf-8") as stream:
        for number, prompt in enumerate(sorted(chosen, key=lambda prompt: (prompt.source, prompt.line))):
            record = {**asdict(prompt), "id": f"heldout-{number:02d}"}
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    typer.echo(f"{len(chosen)} prompts from {len({prompt.source for prompt in chosen})} files")


if __name__ == "__main__":
    typer.run(main)
