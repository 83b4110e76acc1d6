"""Acceptance of chains."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.services.models.acceptance import accept


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data(), st.integers(0, 5), st.integers(0, 4))
def test_counts_leading_matches(data: st.DataObject, num_draft_tokens: int, num_rows: int) -> None:
    tokens = st.integers(0, 1)
    draft = [data.draw(st.lists(tokens, min_size=num_draft_tokens, max_size=num_draft_tokens)) for _ in range(num_rows)]
    target = [[*row, 0] for row in draft]
    for row in target:
        for index in data.draw(st.sets(st.integers(0, num_draft_tokens))):
            row[index] = 9
    expected = []
    for draft_row, target_row in zip(draft, target, strict=True):
        matches = 0
        while matches < num_draft_tokens and draft_row[matches] == target_row[matches]:
            matches += 1
        expected.append(matches)
    num_accepted = accept(
        torch.tensor(draft, dtype=torch.int64).view(num_rows, num_draft_tokens),
        torch.tensor(target, dtype=torch.int64).view(num_rows, num_draft_tokens + 1),
    )
    assert num_accepted.dtype == torch.int64
    assert num_accepted.tolist() == expected
