"""Turns tokens into text as they come: no character is sent in halves, and none is decoded twice.

The parts of a text, put together, equal the tokenizer's text for all tokens at once. That rules out decoding each
token alone (a character may take several tokens, and the first token may lose a space), and speed rules out decoding
all tokens again. So the kind of the tokenizer's decoder decides, and the text of each token is cached:

- Byte-level decoders: a token is bytes, and the text is their UTF-8.
- Decoders that go piece by piece, with bytes as a fallback (SentencePiece, as a rule): the text of a token depends
  only on whether it is the first. Several byte tokens in a row are text only together, when the row has ended.
- Any other decoder: a window of the last tokens is decoded, as far back as their text was certain.

The text of a completion continues its prompt's: it is what `decode(prompt + output)` has after `decode(prompt)`. So the
prompt's last tokens are decoded first, and their text is dropped.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache, partial
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

MAX_WINDOW_TOKENS = 32
"""No character takes as many tokens: bytes that are no text by then never will be."""

MAX_ROW_TOKENS = 4096
"""The most byte tokens at the end of a prompt that are decoded with an output's first ones."""

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INNER_BYTE_PIECE = re.compile(r"<0x[89ABab][0-9A-Fa-f]>")
"""A byte that is not the first of a character in UTF-8."""
_PIECEWISE = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"})


class Detokenizer(Protocol):
    """Turns the tokens of one sample into text."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token; empty for a special token."""

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text that became certain with these tokens, and how many code points of it with each token."""

    def finish(self) -> str:
        """Returns the rest, with U+FFFD in place of bytes that are no character."""


class KnownTexts(dict[int, str | None]):
    """A cache of each token's text; None if the text depends on its neighbours.

    `join` looks up many tokens without interpreter work for each.
    """

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._text_of = text_of

    def __missing__(self, token_id: int) -> str | None:
        return self.setdefault(token_id, self._text_of(token_id))

    def join(self, token_ids: Sequence[int]) -> tuple[str, list[int]] | None:
        """The text of tokens and the length of each; None if the text of one depends on its neighbours."""
        texts: list[Any] = list(map(self.__getitem__, token_ids))
        try:
            return "".join(texts), list(map(len, texts))
        except TypeError:
            return None


class Vocabulary:
    """The text of each token of a tokenizer, shared by all jobs; a cache that fills up as tokens are seen."""

    def __init__(self, tokenizer: Any, *, skips_special: bool = True) -> None:
        """`skips_special`: special tokens have no text; else they have their names."""
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._showing: Vocabulary | None = None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._steps = [] if self._backend is None else _decoder_steps(self._backend.decoder)
        self.special_tokens = self._special_tokens()
        """By name, the ids of the special tokens."""
        self._names = {token_id: name for name, token_id in self.special_tokens.items()}
        self._is_bytewise = any(step["type"] == "ByteFallback" for step in self._steps)
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str | None] = {}
        self._texts: dict[int, tuple[str, str]] = {}
        self.whole_characters = KnownTexts(self._whole_characters)
        """For a byte-level vocabulary: tokens that neither begin nor end within a character."""
        self.inner_pieces = KnownTexts(self._inner_piece)
        """For a vocabulary of pieces: pieces after the first that are no single byte."""

    def for_output(self, *, shows_special: bool) -> Vocabulary:
        """The vocabulary for a text with the names of special tokens, or this one."""
        if not shows_special:
            return self
        if self._showing is None:
            self._showing = Vocabulary(self._tokenizer, skips_special=False)
        return self._showing

    def new_detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Makes a detokenizer for a sample; `prompt` is what its text continues, empty for a text of its own."""
        if not prompt:
            return self._new_detokenizer()
        return ContinuingDetokenizer(self._new_detokenizer, partial(self.end_of, prompt))

    def _new_detokenizer(self) -> Detokenizer:
        kinds = [step["type"] for step in self._steps]
        if kinds == ["ByteLevel"]:
            return ByteLevelDetokenizer(self)
        if self._backend is not None and _is_piecewise(self._steps):
            return PieceDetokenizer(self, has_byte_pieces="ByteFallback" in kinds)
        return WindowDetokenizer(self.decode)

    def end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, on which the text of the next tokens may depend. Special tokens are left out.

        They begin before any byte tokens at the end, which are text only together; of more than MAX_ROW_TOKENS, with
        the first byte of a character.
        """
        end: list[int] = []
        for token in reversed(prompt):
            piece = self._piece_of_any(token)
            if piece is None:
                continue
            if len(end) >= MAX_WINDOW_TOKENS and not _BYTE_PIECE.fullmatch(piece):
                break
            end.append(token)
            if len(end) >= MAX_ROW_TOKENS and not _INNER_BYTE_PIECE.fullmatch(piece):
                break
        return end[::-1]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokenizer's text of the tokens, without special tokens."""
        options = {"skip_special_tokens": self._skips_special, "clean_up_tokenization_spaces": False}
        return _text_by(self._tokenizer.decode, list(token_ids), **options)

    def piece(self, token_id: int) -> str | None:
        """The token as the decoder sees it; None if it is special or does not exist."""
        try:
            return self._pieces[token_id]
        except KeyError:
            assert self._backend is not None, "pieces are a tokenizer backend's"
            piece = self._backend.id_to_token(token_id)
            is_skipped = self._skips_special and piece in self.special_tokens
            return self._pieces.setdefault(token_id, None if is_skipped else piece)

    def _piece_of_any(self, token_id: int) -> str | None:
        """`piece`; empty for a tokenizer without a backend, which has no pieces."""
        if self._backend is not None:
            return self.piece(token_id)
        return None if self._skips_special and token_id in self.special_tokens.values() else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text that goes on; the name of a special token."""
        if (name := self._names.get(token_id)) is not None:
            return name.encode()
        if self._backend is None or not (piece := self.piece(token_id)):
            return self.decode([token_id]).encode()
        if isinstance(self._new_detokenizer(), ByteLevelDetokenizer):
            return self.bytes_of(token_id)
        if self._is_bytewise and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return self.texts_of(token_id, piece)[1].encode()

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary."""
        try:
            return self._bytes[token_id]
        except KeyError:
            return self._bytes.setdefault(token_id, _byte_level(self.piece(token_id) or ""))

    def texts_of(self, token_id: int, piece: str) -> tuple[str, str]:
        """The text of a piece as the first of all, and behind another."""
        try:
            return self._texts[token_id]
        except KeyError:
            return self._texts.setdefault(token_id, (self.join([piece]), self.join_behind([piece])))

    def join(self, pieces: list[str]) -> str:
        """The text of pieces at the beginning."""
        assert self._backend is not None, "pieces are a tokenizer backend's"
        decoder = self._backend.decoder
        return " ".join(pieces) if decoder is None else _text_by(decoder.decode, pieces)

    def join_behind(self, pieces: list[str]) -> str:
        """The text that pieces add behind other pieces."""
        return self.join(["a", *pieces])[len(self.join(["a"])) :]

    def _whole_characters(self, token_id: int) -> str | None:
        try:
            return self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _inner_piece(self, token_id: int) -> str | None:
        piece = self.piece(token_id)
        if piece is None:
            return ""
        return None if _BYTE_PIECE.fullmatch(piece) else self.texts_of(token_id, piece)[1]

    def _special_tokens(self) -> dict[str, int]:
        if self._backend is None:
            return dict(zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True))
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}


class ByteLevelDetokenizer:
    """Implements `Detokenizer` for byte-level decoders: a token is bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._known = vocabulary.whole_characters
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within_character = False

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._bytes_of(token_id))
        self._is_within_character = bool(self._decoder.getstate()[0])
        return text

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        known = None if self._is_within_character else self._known.join(token_ids)
        return known or _push_each(self, token_ids)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """Implements `Detokenizer` for piecewise decoders: a token is a piece of text, or a single byte of a character."""

    def __init__(self, vocabulary: Vocabulary, *, has_byte_pieces: bool) -> None:
        self._vocabulary = vocabulary
        self._has_byte_pieces = has_byte_pieces
        self._bytes: list[str] = []
        self._is_first = True

    def push(self, token_id: int) -> str:
        piece = self._vocabulary.piece(token_id)
        if piece is None:
            return ""
        if self._has_byte_pieces and _BYTE_PIECE.fullmatch(piece):
            self._bytes.append(piece)
            return ""
        before = self.finish() if self._bytes else ""
        first, behind = self._vocabulary.texts_of(token_id, piece)
        text = before + (first if self._is_first else behind)
        self._is_first = False
        return text

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        known = None if self._is_first or self._bytes else self._vocabulary.inner_pieces.join(token_ids)
        return known or _push_each(self, token_ids)

    def finish(self) -> str:
        pieces, self._bytes = self._bytes, []
        if not pieces:
            return ""
        join = self._vocabulary.join if self._is_first else self._vocabulary.join_behind
        self._is_first = False
        return join(pieces)


class WindowDetokenizer:
    """Implements `Detokenizer` for any other decoder: decodes the last tokens again with each new one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_read = 0
        self._sent = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_read < MAX_WINDOW_TOKENS:
            return ""
        new = text[len(self._sent) :]
        # The next tokens are decoded behind those whose text is new. Spaces would not do: a decoder may leave them
        # out at the beginning of a text.
        if new.strip() or len(self._window) >= 2 * MAX_WINDOW_TOKENS:
            self._window = self._window[self._num_read :]
            text = self._decode(self._window)
        self._num_read = len(self._window)
        self._sent = text
        return new

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        return _push_each(self, token_ids)

    def finish(self) -> str:
        return self._decode(self._window)[len(self._sent) :]


class ContinuingDetokenizer:
    """Implements `Detokenizer` for a text that continues a prompt's: drops what the prompt's own text has of it."""

    def __init__(self, make: Callable[[], Detokenizer], end_of_prompt: Callable[[], Sequence[int]]) -> None:
        """Both are called when the first token comes, and may raise what `Detokenizer.push` raises."""
        self._make = make
        self._end_of_prompt = end_of_prompt
        self._detokenizer: Detokenizer | None = None
        self._prompt_rest = ""
        """The end of the prompt's text, where the detokenizer still holds back its tokens."""

    def push(self, token_id: int) -> str:
        return self._without_prompt(self._begun().push(token_id))

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        detokenizer = self._begun()
        return _push_each(self, token_ids) if self._prompt_rest else detokenizer.push_all(token_ids)

    def finish(self) -> str:
        return self._without_prompt(self._begun().finish())

    def _begun(self) -> Detokenizer:
        if self._detokenizer is None:
            end = self._end_of_prompt()
            ended, detokenizer = self._make(), self._make()
            ended.push_all(end)
            self._prompt_rest = ended.finish()
            detokenizer.push_all(end)
            self._detokenizer = detokenizer
        return self._detokenizer

    def _without_prompt(self, text: str) -> str:
        if not (text and self._prompt_rest):
            return text
        rest, self._prompt_rest = self._prompt_rest, ""
        return text[len(list(takewhile(bool, map(eq, rest, text)))) :]


def _text_by(decode: Callable[..., str], tokens: list[Any], **options: bool) -> str:
    """Calls a tokenizer. A panic of its backend, which is no Exception, becomes one: it is one output's error."""
    try:
        return decode(tokens, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise ValueError(f"the tokenizer cannot decode {tokens}: {panic}") from panic


def _push_each(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """Implements `Detokenizer.push_all` token by token."""
    texts = [detokenizer.push(token) for token in token_ids]
    return "".join(texts), [len(text) for text in texts]


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_piecewise(steps: list[dict[str, Any]]) -> bool:
    """True if a piece's text depends only on whether there is one before it."""
    is_fused = False
    for step in steps:
        is_fused = is_fused or step["type"] == "Fuse"
        if step["type"] not in _PIECEWISE:
            return False
        # After Fuse, a strip of several leading characters, or of trailing ones, may affect several pieces.
        if step["type"] == "Strip" and is_fused and (step["start"] > 1 or step["stop"] > 0):
            return False
    return True


def _byte_level(piece: str) -> bytes:
    """The bytes of a piece of a byte-level vocabulary, which writes them as printable characters."""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
