"""Tests of a job's total usage, added up from its samples'."""

from __future__ import annotations

from dataclasses import replace

from slipstream.common.api.output_chunk import Usage

SAMPLE = Usage(
    prompt_tokens=3,
    completion_tokens=5,
    total_draft_tokens=8,
    total_accepted_tokens=2,
    num_verify_steps=2,
    mean_accept_length=2.0,
    accepted_per_position=(2, 0),
    seed=7,
    queue_seconds=0.25,
    time_to_first_token_seconds=0.5,
    end_to_end_seconds=2.0,
    mean_inter_token_latency_seconds=0.375,
)
NEVER_BEGAN = Usage(
    prompt_tokens=3,
    completion_tokens=0,
    total_draft_tokens=0,
    total_accepted_tokens=0,
    num_verify_steps=0,
    mean_accept_length=1.0,
    seed=8,
    queue_seconds=1.0,
    time_to_first_token_seconds=0.0,
    end_to_end_seconds=1.0,
)


def test_samples_that_never_began_have_no_first_token() -> None:
    assert Usage.together([NEVER_BEGAN, SAMPLE]) == replace(SAMPLE, seed=8)
    assert Usage.together([NEVER_BEGAN, NEVER_BEGAN]) == NEVER_BEGAN


def test_counts_are_sums_and_the_prompt_counts_once() -> None:
    later = replace(SAMPLE, completion_tokens=2, queue_seconds=0.5, time_to_first_token_seconds=1.0, seed=9)
    assert Usage.together([SAMPLE, later]) == replace(
        SAMPLE,
        completion_tokens=7,
        total_draft_tokens=16,
        total_accepted_tokens=4,
        num_verify_steps=4,
        accepted_per_position=(4, 0),
    )
