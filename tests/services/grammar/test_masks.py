"""Masks beside draft tokens: those of a matcher that has only ever seen the output."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLExecutor

from slipstream.common.grammars import new_matcher
from slipstream.services.grammar.matchers import MaskFiller
from tests.harness.constraint_corpus import EOS_ID, bundled_tokenizer, cases

GRAMMARS = {case.name: case.grammar for case in cases() if case.field == "grammar"}
K = 4


def allowed(mask: np.ndarray) -> np.ndarray:
    """The tokens of a mask."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def test_masks_do_not_depend_on_the_draft_tokens_of_earlier_steps() -> None:
    masks = np.zeros((1, K + 1, bundled_tokenizer().vocab_size // 32), np.int32)
    filler = MaskFiller(masks, LLExecutor(1))
    seed = random.randrange(2**32)
    for number in range(seed, seed + 12):
        print(f"seed {number}")
        draw = random.Random(number)
        matcher, tokens = new_matcher(bundled_tokenizer(), GRAMMARS["grammar: balanced"]), list[int]()
        while len(tokens) < 60:
            fresh = new_matcher(bundled_tokenizer(), GRAMMARS["grammar: balanced"])
            fresh.consume_tokens(tokens)
            drafts = []
            for _ in range(K):
                found = allowed(np.frombuffer(fresh.compute_bitmask(), np.int32)[: masks.shape[2]])
                token = int(draw.choice(found[found != EOS_ID]))
                drafts.append(token)
                fresh.consume_token(token)
            assert not filler.fill([(0, matcher, drafts)])
            fresh = new_matcher(bundled_tokenizer(), GRAMMARS["grammar: balanced"])
            fresh.consume_tokens(tokens)
            for row in range(K + 1):
                expected = np.frombuffer(fresh.compute_bitmask(), np.int32)[: masks.shape[2]]
                assert (masks[0, row] == expected).all(), (tokens, drafts, row)
                if row < K:
                    fresh.consume_token(drafts[row])
            found = allowed(masks[0, 0])
            new = [*drafts[: draw.randrange(K)], int(draw.choice(found[found != EOS_ID]))][: draw.randrange(1, K)]
            taken = matcher.try_consume_tokens(new)
            tokens += new[:taken]


def test_places_after_a_draft_token_that_may_not_stand_have_masks() -> None:
    """Any: logits of which nothing is left would be a fault of the model's."""
    masks = np.zeros((2, K + 1, bundled_tokenizer().vocab_size // 32), np.int32)
    filler, matcher = MaskFiller(masks, LLExecutor(1)), new_matcher(bundled_tokenizer(), GRAMMARS["grammar: balanced"])
    filler.clear(1)
    (wrong,) = bundled_tokenizer().tokenize_str("x")
    assert not filler.fill([(1, matcher, [wrong] * K)])
    assert wrong not in allowed(masks[1, 0])
    assert masks[1].any(axis=1).all()
    assert not masks[0].any()
