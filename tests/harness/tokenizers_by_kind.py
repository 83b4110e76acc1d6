"""Small tokenizers of every kind of decoder, as `transformers` wraps them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Never

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.gateway.model import ServedModel

TEXT = "Hello world, how are you? 你好世界 👩‍👩‍👧 é ñ a\u0308e\u0301 ไทย  double  spaces\n\nnew\tline don't ▁x"

PANICS = "panics"
_LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
_PIECE_DECODERS: dict[str, Any] = {
    "llama": decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([*_LLAMA]),
    "metaspace": decoders.Metaspace(),
    "metaspace, bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
    "bytes, metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace, no prefix": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    "wordpiece": decoders.WordPiece(),
    "suffix": decoders.BPEDecoder(),
    "strip": decoders.Sequence([*_LLAMA, decoders.Strip(" ", 2, 0)]),
    "none": None,
    # To strip more of a single space than there is makes the library panic.
    PANICS: decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 1)]),
}
KINDS = ("byte level", *(kind for kind in _PIECE_DECODERS if kind != PANICS))
EXACT_KINDS = tuple(kind for kind in KINDS if kind not in ("suffix", "strip"))
"""Kinds whose text is known token by token; the others are decoded in a window."""


@lru_cache
def make_tokenizer(kind: str) -> Any:
    """A tokenizer that `transformers` wraps, with special tokens, plain added ones, and a vocabulary of about 350."""
    backend = _byte_level() if kind == "byte level" else _pieces(_PIECE_DECODERS[kind])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 10, trainer)
    tokenizer.add_tokens(["<plain>", "café", "数"])
    return tokenizer


def _pieces(decoder: Any) -> Tokenizer:
    """Like SentencePiece's with bytes as a fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set(TEXT) - {" ", "▁"})]
    pieces += ["▁Hello", "▁world", "He", "ll", "▁▁", "a▁b", "##ing", "on</w>", "<0x4>"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<plain>"])
    return tokenizer


def text_after(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What the tokenizer's own text of a prompt and an output has after that of the prompt."""
    both, before = (
        str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for tokens in ([*prompt, *ids], prompt)
    )
    while not both.startswith(before):
        before = before[:-1]
    return both[len(before) :]


class BrokenDetokenizer:
    """Knows no token."""

    def push(self, token_id: int) -> Never:
        """See `Detokenizer`."""
        raise OverflowError(f"no token has the number {token_id}")

    def push_all(self, token_ids: Sequence[int]) -> Never:
        """See `Detokenizer`."""
        self.push(token_ids[0])

    def finish(self) -> str:
        """See `Detokenizer`."""
        return ""


def break_first_detokenizer(model: ServedModel) -> None:
    """Gives the next sample that comes to `model` a detokenizer that fails; those behind it have their own."""
    made, make = iter([BrokenDetokenizer()]), model.vocabulary.new_detokenizer
    model.vocabulary.new_detokenizer = lambda prompt=(): next(made, None) or make(prompt)  # type: ignore[method-assign]
