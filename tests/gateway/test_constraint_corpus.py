"""Whatever is chosen among the tokens that a mask allows, the output keeps to the constraint: random walks."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from slipstream.common.grammars import new_matcher
from tests.harness.constraint_corpus import EOS_ID, bundled_tokenizer, cases

CASES = {case.name: case for case in cases()}
FREE_TOKENS, MOST_TOKENS = 60, 2000
"""Tokens that are drawn evenly, and from which on the walk has failed; in between it makes for the end."""


@cache
def short_tokens() -> tuple[np.ndarray, np.ndarray]:
    """For each token, whether it is a single byte, and whether that closes something."""
    texts = [bundled_tokenizer().decode_bytes([token]) for token in range(bundled_tokenizer().vocab_size)]
    is_closing = [text in (b'"', b"]", b"}", b")") for text in texts]
    return np.array([len(text) == 1 for text in texts]), np.array(is_closing)


def walk(grammar: str, seed: int) -> str:
    """An output of tokens drawn among those allowed, which ends where it may."""
    draw = random.Random(seed)
    matcher, tokens = new_matcher(bundled_tokenizer(), grammar), list[int]()
    while True:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask)
        assert not matcher.is_error(), matcher.get_error()
        assert len(allowed), f"nothing may follow {bundled_tokenizer().decode_str(tokens)!r}"
        assert (allowed[0] == EOS_ID) == matcher.is_accepting()
        if allowed[0] == EOS_ID and (len(tokens) >= FREE_TOKENS or draw.random() < 0.3):
            return bundled_tokenizer().decode_bytes(tokens).decode()
        if len(tokens) >= FREE_TOKENS:
            single, closing = short_tokens()
            for kind in (single, closing) if draw.random() < 0.5 else (single,):
                allowed = allowed[kind[allowed]] if kind[allowed].any() else allowed
        token = int(draw.choice(allowed))
        if token == EOS_ID:
            return bundled_tokenizer().decode_bytes(tokens).decode()
        assert matcher.consume_token(token)
        tokens.append(token)
        assert len(tokens) < MOST_TOKENS, bundled_tokenizer().decode_str(tokens)[-100:]


def test_the_corpus_is_compiled() -> None:
    fields = [case.field for case in CASES.values()]
    assert all(fields.count(field) >= least for field, least in (("json_schema", 60), ("regex", 20), ("grammar", 10)))
    assert len(CASES) == len(cases())
    for case in CASES.values():
        assert case.grammar


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
def test_whatever_a_mask_allows_keeps_to_the_constraint(name: str) -> None:
    grammar = CASES[name].grammar
    seed = random.randrange(2**32)
    for number in range(seed, seed + 6):
        text = walk(grammar, number)
        print(f"seed {number}: {text!r}")
        CASES[name].check(text)
