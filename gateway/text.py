"""The text of a sample: tokens become text as they arrive, and stop strings end it.

No character is sent in halves, and no token is decoded twice. The parts of a text, put together, equal the tokenizer's
text for all tokens at once. That rules out decoding each token by itself (a character may take several tokens, and the
first token may lose a space), and speed rules out decoding all tokens again. So the kind of the tokenizer's decoder
decides, and the text of each token is cached:

- Byte-level decoders: a token is bytes, and the text is their UTF-8.
- Decoders that go piece by piece, with bytes as a fallback (SentencePiece, as a rule): the text of a token depends
  only on whether it is the first. Several byte tokens in a row are text only together, when the row has ended.
- Any other decoder: a window of the last tokens is decoded, as far back as their text was certain.

The text of a completion continues its prompt's: it is what `decode(prompt + output)` has after `decode(prompt)`. So the
prompt's last tokens are decoded first, and their text is dropped.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from abc import ABC, abstractmethod
from array import array
from functools import cache, lru_cache, partial
from itertools import accumulate, chain, takewhile
from operator import eq, sub
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"

MAX_WINDOW_TOKENS = 32
"""Tokens of a window: no character takes more, and bytes that are no text by then never will be."""

MAX_ROW_TOKENS = 4096
"""The most byte tokens at the end of a prompt that are decoded with an output's first ones."""

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INNER_BYTE_PIECE = re.compile(r"<0x[89ABab][0-9A-Fa-f]>")
"""A byte that is not the first of a character in UTF-8."""
_PIECEWISE = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"})


class Detokenizer(ABC):
    """Turns the tokens of one sample into text."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token; empty for a special token."""

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text that became certain with these tokens, and how many code points of it with each token."""
        texts = [self.push(token) for token in token_ids]
        return "".join(texts), [len(text) for text in texts]

    @abstractmethod
    def finish(self) -> str:
        """Returns the rest, with U+FFFD in place of bytes that are no character."""


class Vocabulary:
    """The text of each token of a tokenizer, shared by all jobs: cached as tokens are seen."""

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
        self.piece = cache(self._find_piece)
        """Maps a token to its piece, as the decoder sees it; to None if it is special or does not exist.

        Empty for a tokenizer without a backend, which has no pieces.
        """
        self.bytes_of = cache(lambda token_id: _byte_level(self.piece(token_id) or ""))
        """Maps a token of a byte-level vocabulary to its bytes."""
        self.texts_of = cache(self._find_texts)
        """Maps a token that has a piece to its text as the first of all tokens, and after another one."""
        self.whole_characters = cache(self._find_whole_characters)
        """Maps a token of a byte-level vocabulary to its text; to None if it begins or ends within a character."""
        self.inner_pieces = cache(self._find_inner_piece)
        """Maps a token to its text after other pieces; to None if it is a single byte."""

    def for_output(self, *, shows_special: bool) -> Vocabulary:
        """Returns the vocabulary for a text with the names of special tokens, or this one."""
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
        """Returns the last tokens of a prompt, on which the text of the next tokens may depend; no special tokens.

        They begin before any byte tokens at the end, which are text only together; of more than MAX_ROW_TOKENS, with
        the first byte of a character.
        """
        end: list[int] = []
        for token in reversed(prompt):
            piece = self.piece(token)
            if piece is None:
                continue
            if len(end) >= MAX_WINDOW_TOKENS and not _BYTE_PIECE.fullmatch(piece):
                break
            end.append(token)
            if len(end) >= MAX_ROW_TOKENS and not _INNER_BYTE_PIECE.fullmatch(piece):
                break
        return end[::-1]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text that goes on; the name of a special token."""
        if (name := self._names.get(token_id)) is not None:
            return name.encode()
        if not (piece := self.piece(token_id)):
            return self.decode([token_id]).encode()
        if isinstance(self._new_detokenizer(), ByteLevelDetokenizer):
            return self.bytes_of(token_id)
        if self._is_bytewise and _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return self.texts_of(token_id)[1].encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the tokenizer's text of the tokens."""
        options = {"skip_special_tokens": self._skips_special, "clean_up_tokenization_spaces": False}
        return _text_by(self._tokenizer.decode, list(token_ids), **options)

    def join(self, pieces: list[str]) -> str:
        """Returns the text of pieces at the beginning."""
        assert self._backend is not None, "pieces are a tokenizer backend's"
        decoder = self._backend.decoder
        return " ".join(pieces) if decoder is None else _text_by(decoder.decode, pieces)

    def join_after(self, pieces: list[str]) -> str:
        """Returns the text that pieces add after other pieces."""
        return self.join(["a", *pieces])[len(self.join(["a"])) :]

    def _find_piece(self, token_id: int) -> str | None:
        if self._backend is None:
            return None if self._skips_special and token_id in self._names else ""
        piece: str | None = self._backend.id_to_token(token_id)
        return None if self._skips_special and piece in self.special_tokens else piece

    def _find_texts(self, token_id: int) -> tuple[str, str]:
        pieces = [self.piece(token_id) or ""]
        return self.join(pieces), self.join_after(pieces)

    def _find_whole_characters(self, token_id: int) -> str | None:
        try:
            return self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _find_inner_piece(self, token_id: int) -> str | None:
        piece = self.piece(token_id)
        if piece is None:
            return ""
        return None if _BYTE_PIECE.fullmatch(piece) else self.texts_of(token_id)[1]

    def _special_tokens(self) -> dict[str, int]:
        if self._backend is None:
            return dict(zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True))
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}


class ByteLevelDetokenizer(Detokenizer):
    """For byte-level decoders: a token is bytes."""

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
        known = None if self._is_within_character else _join_known(self._known, token_ids)
        return known or super().push_all(token_ids)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer(Detokenizer):
    """For piecewise decoders: a token is a piece of text, or a single byte of a character."""

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
        first, after = self._vocabulary.texts_of(token_id)
        text = before + (first if self._is_first else after)
        self._is_first = False
        return text

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        known = None if self._is_first or self._bytes else _join_known(self._vocabulary.inner_pieces, token_ids)
        return known or super().push_all(token_ids)

    def finish(self) -> str:
        pieces, self._bytes = self._bytes, []
        if not pieces:
            return ""
        join = self._vocabulary.join if self._is_first else self._vocabulary.join_after
        self._is_first = False
        return join(pieces)


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes the last tokens again with each new one."""

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
        # The next tokens are decoded after those whose text is new. Spaces would not do: a decoder may leave them
        # out at the beginning of a text.
        if new.strip() or len(self._window) >= 2 * MAX_WINDOW_TOKENS:
            self._window = self._window[self._num_read :]
            text = self._decode(self._window)
        self._num_read = len(self._window)
        self._sent = text
        return new

    def finish(self) -> str:
        return self._decode(self._window)[len(self._sent) :]


class ContinuingDetokenizer(Detokenizer):
    """For a text that continues a prompt's: drops what the prompt's own text has of it."""

    def __init__(self, make: Callable[[], Detokenizer], end_of_prompt: Callable[[], Sequence[int]]) -> None:
        """Both are called with the first token, and may raise what `Detokenizer.push` raises."""
        self._make = make
        self._end_of_prompt = end_of_prompt
        self._detokenizer: Detokenizer | None = None
        self._prompt_rest = ""
        """The end of the prompt's text, where the detokenizer still holds back its tokens."""

    def push(self, token_id: int) -> str:
        return self._without_prompt(self._begun().push(token_id))

    def push_all(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        detokenizer = self._begun()
        return super().push_all(token_ids) if self._prompt_rest else detokenizer.push_all(token_ids)

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


class OutputText:
    """The text of a sample's tokens, up to a stop string: about 4 bytes a token, and the text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_new_tokens: int = 0) -> None:
        """`detokenizer`: this text's own. The first `min_new_tokens` tokens complete none of the stop strings."""
        self._detokenizer: Detokenizer | None = detokenizer
        self._stops = StopMatcher(stops) if stops else None
        self._min_new_tokens = min_new_tokens
        self._text = io.StringIO()
        self._ends = array("I")
        """For each token, the number of code points up to and including its own."""
        self.rest: str | None = None
        """Once the text has ended: what was held back, where it can belong to no token."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are text."""
        return len(self._ends)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.matched

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens, up to the one that completes a stop string."""
        text, lengths = self.decode(token_ids)
        if self._stops is None or self._stops.passes(text):
            self.append(text, lengths)
            return
        start = 0
        for length in lengths:
            certain = self._certain(text[start : start + length])
            start += length
            self.append(certain, [len(certain)])
            if self.matched is not None:
                self.rest = ""
                return

    def decode(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text of the next tokens, and the length of each, for `append`. Only without stop strings."""
        return self._present_detokenizer.push_all(token_ids)

    def end(self, token_id: int | None, *, is_shown: bool) -> None:
        """Ends the text, with its last token if that arrived with the end; a token that stops is not shown."""
        text = self._present_detokenizer.push(token_id) if token_id is not None and is_shown else ""
        text = self._certain(text + self._present_detokenizer.finish())
        if self._stops is not None:
            text += self._stops.finish()
        if token_id is None:
            self.rest = text
        else:
            self.append(text, [len(text)])
            self.rest = ""

    def read(self, start: int, end: int) -> tuple[str, list[int]]:
        """Returns the text of the tokens [start, end), and the number of its code points with each."""
        first, ends = self._ends[start - 1] if start else 0, self._ends[start:end]
        self._text.seek(first)
        text = self._text.read(ends[-1] - first) if ends else ""
        return text, list(map(sub, ends, chain((first,), ends)))

    def forget_tokenizer(self) -> None:
        """Drops the tokenizer: no token is added any more."""
        self._detokenizer = None

    @property
    def _present_detokenizer(self) -> Detokenizer:
        assert self._detokenizer is not None, "all was text before the tokenizer was forgotten"
        return self._detokenizer

    def _certain(self, text: str) -> str:
        """Returns the part of the text so far that cannot belong to a stop string; `text` is the next token's."""
        if self._stops is None:
            return text
        return self._stops.push(text, counts=len(self._ends) >= self._min_new_tokens)

    def append(self, text: str, lengths: list[int]) -> None:
        """Adds the text of tokens, and the length of each; takes the list over."""
        self._text.seek(0, io.SEEK_END)
        self._text.write(text)
        lengths[0] += self._ends[-1] if self._ends else 0
        self._ends.extend(accumulate(lengths))


class StopMatcher:
    """Finds the stop strings of a sample in text that arrives in parts; holds back text that may become one.

    The stop string that is complete first ends the text, the longest if several are complete at once: so the end
    depends only on the text, not on its parts.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops`: none of them empty."""
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        firsts = "".join(re.escape(stop[0]) for stop in self._stops)
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def passes(self, text: str) -> bool:
        """Returns whether no stop string is under way or begins in the text; then it need not be pushed."""
        return not self._held and self.matched is None and self._first.search(text) is None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Adds text and returns the text that is certain to stay; after the end, nothing.

        A stop string that is complete with text that does not count (`counts`) is ignored.
        """
        if self.matched is not None:
            return ""
        if self.passes(text):
            return text
        known = self._held + text
        # Each ends within the new text: what ended before was ignored.
        begins = [(known.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops]
        complete = [(begin + len(stop), begin, stop) for begin, stop in begins if begin >= 0]
        if complete and counts:
            _, begin, self.matched = min(complete)
            self._held = ""
            return known[:begin]
        starts = range(max(0, len(known) - self._longest), len(known))
        certain = next((start for start in starts if self._may_go_on(known[start:])), len(known))
        self._held = known[certain:]
        return known[:certain]

    def _may_go_on(self, text: str) -> bool:
        return any(len(stop) > len(text) and stop.startswith(text) for stop in self._stops)

    def finish(self) -> str:
        """Returns the text held back: there is no more text to complete a stop string."""
        held, self._held = self._held, ""
        return held


def _text_by(decode: Callable[..., str], tokens: list[Any], **options: bool) -> str:
    """Calls a tokenizer. A panic of its backend, which is no Exception, becomes one: it is one output's error."""
    try:
        return decode(tokens, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise ValueError(f"the tokenizer cannot decode {tokens}: {panic}") from panic


def _join_known(text_of: Callable[[int], str | None], token_ids: Sequence[int]) -> tuple[str, list[int]] | None:
    """Returns the text of tokens and the length of each; None if the text of one depends on its neighbours."""
    texts: list[Any] = list(map(text_of, token_ids))
    try:
        return "".join(texts), list(map(len, texts))
    except TypeError:
        return None


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_piecewise(steps: list[dict[str, Any]]) -> bool:
    """Returns whether a piece's text depends only on whether there is one before it."""
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
    """Returns the bytes of a piece of a byte-level vocabulary, which writes them as printable characters."""
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
