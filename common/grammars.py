"""Grammars of outputs, as llguidance has them: the gateway compiles each once to check it, the grammar worker again.

Both use the same tokenizer and the same limits, so that the worker takes what the gateway accepted. The package
llguidance is an extra, `constraints`: only what needs it imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from slipstream.common.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

MAX_LEXER_STATES = 50_000
"""States of a grammar's lexer, of one to two KiB each."""
MAX_COMPILE_STACK_BYTES = 4 * 2**20
"""Stack with which the gateway compiles; a grammar whose rules refer to one another too deeply ends that process. The
grammar worker has more, as it must survive whatever the gateway accepts."""
_MAX_REASON = 400
"""Characters of a reason in a message."""


def load_grammar_tokenizer(path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> LLTokenizer:
    """Loads the tokenizer of a model's directory, for masks of `vocab_size` bits. Takes about a second for 128,000 ids.

    Raises CheckpointError where outputs of the model cannot be constrained.
    """
    try:
        if not eos_token_ids:
            raise ValueError("the model names no end of sequence")
        tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise CheckpointError(f"{path}: outputs cannot be constrained: {one_line(str(error))}") from error


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles a serialised grammar. Raises ValueError with the library's reason."""
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(one_line(matcher.get_error()))
    return matcher


def check_begin(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Raises ValueError if a grammar that was compiled has no output: no token can be its first."""
    mask = bytearray(matcher.compute_bitmask())
    if not matcher.is_accepting():
        # Where nothing else can come, the library allows the end.
        for token in tokenizer.eos_tokens:
            mask[token // 8] &= ~(1 << token % 8)
    if matcher.is_error() or not any(mask):
        raise ValueError("no output can keep to it: no token can be the first")


def one_line(reason: str) -> str:
    """A reason of the library in one line of bounded length."""
    return " ".join(reason.split())[:_MAX_REASON]
