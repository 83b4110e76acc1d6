"""A swap of the draft: messages come out the same, and terms that make no sense are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.server import DraftFigures, DraftSwap, SwapOutcome, SwapTerms
from slipstream.protos import scheduler_pb2


@pytest.mark.parametrize(
    "swap",
    [
        DraftSwap(address=""),
        DraftSwap(address="unix:/d", terms=SwapTerms(num_draft_tokens=3, judge_steps=0, rollback_below=0.0)),
    ],
)
def test_a_request_comes_out_the_same(swap: DraftSwap) -> None:
    message = scheduler_pb2.SwapDraftRequest.FromString(swap.to_pb().SerializeToString())
    assert DraftSwap.from_pb(message) == swap


def test_an_outcome_comes_out_the_same() -> None:
    outcome = SwapOutcome(
        before=DraftFigures(algorithm="none"),
        after=DraftFigures(
            algorithm="eagle3",
            num_draft_tokens=4,
            num_steps=200,
            accept_length=2.5,
            tokens_per_second=1e3,
            step_ms=7.25,
        ),
        rolled_back=True,
        reason="fewer tokens accepted",
        longest_pause_ms=12.5,
    )
    message = scheduler_pb2.SwapDraftResponse.FromString(outcome.to_pb().SerializeToString())
    assert SwapOutcome.from_pb(message) == outcome


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_draft_tokens": 0},
        {"judge_steps": -1},
        {"judge_steps": 2**32 - 1},
        {"rollback_below": -0.1},
        {"rollback_below": math.nan},
        {"rollback_below": math.inf},
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        SwapTerms(**wrong)
