"""The byte-level BPE tokenizer, and the corpus as token ids."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.training.corpus import SourceFile, Split, load

if TYPE_CHECKING:
    from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_LENGTH_TOKENS = 1024

# A word takes the one mark before it (" self", "_name", ".append"); digits stand alone; a newline
# stays with the indentation after it, so that most lines of code begin with one token.
PATTERN = r"[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str]) -> Tokenizer:
    """Train on ``texts``. Every byte is a token, so that any UTF-8 text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for ``AutoTokenizer.from_pretrained``."""
    make_fast: Any = PreTrainedTokenizerFast
    fast = make_fast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH_TOKENS,
    )
    fast.save_pretrained(folder)


def encode(files: list[SourceFile], tokenizer: Tokenizer, split: Split, out: Path) -> int:
    """Write one split as ``<split>.npy`` (uint16 [tokens]) and ``<split>.json``; return its tokens.

    Each file is preceded by one end-of-text token. The JSON lists each file's name, its size in
    bytes of UTF-8 and its number of tokens, that first token not counted.
    """
    chosen = [file for file in files if file.split == split]
    encoded = tokenizer.encode_batch([file.text for file in chosen])
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[NDArray[np.uint16]] = []
    index: list[dict[str, object]] = []
    for file, encoding in zip(chosen, encoded, strict=True):
        pieces.append(np.array([end_of_text, *encoding.ids], dtype=np.uint16))
        index.append({"name": file.name, "bytes": file.num_bytes, "tokens": len(encoding.ids)})
    tokens = np.concatenate(pieces)
    np.save(out / f"{split}.npy", tokens)
    (out / f"{split}.json").write_text(json.dumps(index, indent=1) + "\n")
    return len(tokens)


def main(
    corpus: Annotated[Path, typer.Option(help="Folder that the corpus command wrote.")],
    out: Annotated[list[Path], typer.Option(help="Model folder; may be given more than once.")],
    reuse: Annotated[bool, typer.Option(help="Encode the corpus with the tokenizer in the first folder.")] = False,
) -> None:
    """Train the tokenizer on the training files and encode both splits beside them."""
    files = load(corpus)
    if not reuse:
        tokenizer = train(file.text for file in files if file.split == "train")
        for folder in out:
            save(tokenizer, folder)
    loaded = AutoTokenizer.from_pretrained(out[0])
    for split in ("train", "heldout"):
        num_tokens = encode(files, loaded.backend_tokenizer, split, corpus)
        typer.echo(f"{split}: {num_tokens} tokens")


if __name__ == "__main__":
    typer.run(main)
