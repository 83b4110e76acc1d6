"""Ways to choose a token, for what chooses it on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

from slipstream.common.wire.sequence import SamplingParams

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=5, seed=2**64 - 1),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.1, seed=2**63),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.95, min_p=0.02, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9999, seed=6),
    SamplingParams(temperature=2.0, top_k=2**31 - 1, top_p=0.3, seed=7),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5, seed=8),
)
"""One of each kind."""

TIED = (-1.0, 0.0, -1.0, 0.0, 0.0, -1.0)
"""Logits, of which several are the same."""
TIES: list[tuple[dict[str, Any], set[int]]] = [
    ({}, {0, 1, 2, 3, 4, 5}),
    ({"temperature": 0.0}, {1}),
    ({"top_k": 1}, {1}),
    ({"top_k": 2}, {1, 3}),
    ({"top_k": 4}, {1, 3, 4, 0}),
    ({"top_p": 0.05}, {1}),
    ({"top_p": 1 / 3 + 0.01}, {1, 3}),
    ({"min_p": 1.0}, {1, 3, 4}),
    ({"min_p": 0.3}, {0, 1, 2, 3, 4, 5}),
    ({"top_k": 5, "min_p": 0.3}, {0, 1, 2, 3, 4}),
    ({"top_k": 4, "top_p": 0.999}, {1, 3, 4, 0}),
]
"""Changes to sampling at temperature 1, and the tokens that `TIED` then leaves."""
