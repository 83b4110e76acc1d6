"""Grammars, the state of each constrained output in its grammar, and the masks that follow from it, by llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from slipstream.common.errors import CheckpointError, InvalidArgumentError, MismatchError
from slipstream.common.grammars import load_grammar_tokenizer, new_matcher
from slipstream.common.wire.sequence import grammar_digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MOST_KEPT = 256
"""Compiled grammars that are kept beside one for each slot, whose prompt may take long."""


def load_tokenizer(directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Loads the target's tokenizer. Raises MismatchError if the library cannot use it."""
    try:
        return load_grammar_tokenizer(directory, vocab_size, eos_token_ids)
    except CheckpointError as error:
        raise MismatchError([f"tokenizer: {error}"]) from None


class Grammars:
    """Compiled grammars by digest; of too many the least recently used go. Any thread."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.most_kept = MOST_KEPT
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> None:
        """Compiles a grammar, for `matcher`. Raises InvalidArgumentError with the library's reason."""
        digest = grammar_digest(grammar)
        if self.matcher(digest) is not None:
            return
        # Without the lock: it may take a second.
        try:
            made = new_matcher(self._tokenizer, grammar)
        except ValueError as error:
            raise InvalidArgumentError.described("grammar", str(error)) from None
        with self._lock:
            self._compiled[digest] = made
            while len(self._compiled) > self.most_kept:
                self._compiled.popitem(last=False)

    def matcher(self, digest: bytes) -> LLMatcher | None:
        """Returns a matcher at the beginning of an output; None for a grammar that was not compiled, or is gone."""
        with self._lock:
            if (found := self._compiled.get(digest)) is None:
                return None
            self._compiled.move_to_end(digest)
            return found.deep_copy()


class SlotMatcher:
    """The output of the sequence that has a slot, in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.steps: list[int] = []
        """Steps that masks were made for, and whose tokens were in no command yet."""
        self._num_taken = 0
        """Tokens of the output that the matcher has."""

    def take(self, start: int, tokens: Sequence[int]) -> int:
        """Takes in what is new of the tokens after the first `start`; returns their end. A failure is the matcher's."""
        end = start + len(tokens)
        if end > self._num_taken:
            # The rest of a sequence that is over may be any tokens: it then has no masks, and needs none.
            self.matcher.consume_tokens(list(tokens[self._num_taken - end :]))
            self._num_taken = end
        return end


class MaskFiller:
    """Fills the masks of slots, several at once."""

    def __init__(self, masks: NDArray[np.int32], executor: LLExecutor) -> None:
        """`masks`: [slots, K + 1, words]. `executor`: spreads slots over threads."""
        self._masks = masks
        self._address = masks.ctypes.data
        self._executor = executor

    def clear(self, slot: int) -> None:
        """Lets all tokens stand in a slot that another output has from now on."""
        self._masks[slot] = -1

    def fill(self, rows: Sequence[tuple[int, LLMatcher, list[int]]]) -> set[int]:
        """Fills the masks of slots, each with its output's matcher and its draft tokens; returns those that failed.

        Where a draft token may not stand, it is not accepted: after it, any earlier masks of the slot may remain.
        """
        # A matcher that was rolled back, as after draft tokens, may later allow what does not fit; a copy costs 2 us.
        rows = [(slot, matcher.deep_copy() if drafts else matcher, drafts) for slot, matcher, drafts in rows]
        width, words = self._masks.shape[1:]
        size = self._masks.shape[0] * width
        drafted = [(matcher, slot * width, drafts) for slot, matcher, drafts in rows if drafts]
        plain = [(matcher, slot * width) for slot, matcher, drafts in rows if not drafts]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, self._address, 4 * words, size)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, self._address, 4 * words, size)
        return {slot for slot, matcher, _ in rows if matcher.is_error()}
