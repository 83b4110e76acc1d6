"""Tests that chunks, usage and jobs survive the wire format, and that usage adds up over samples."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from slipstream.common.wire.job import (
    FinishReason,
    JobInfo,
    JobPage,
    JobState,
    OutputChunk,
    SampleInfo,
    TokenLogprobs,
    Usage,
)
from slipstream.protos import generation_pb2
from tests.harness.example_states import USAGE

LOGPROBS = (TokenLogprobs(-0.5, ((7, -0.25), (2**32 - 1, -8.0))), TokenLogprobs(-1.5))


@pytest.mark.parametrize("matched", [None, 0, 7, "", "stop"])
def test_chunks_travel(matched: int | str | None) -> None:
    chunk = OutputChunk(
        job_id="a",
        token_offset=2**40,
        token_ids=(1, 2),
        text="hé",
        is_draft=(True, False),
        text_lengths=(0, 2),
        logprobs=LOGPROBS,
        sample_index=3,
        finish_reason=FinishReason.STOP,
        matched_stop=matched,
        usage=USAGE,
        job_usage=replace(USAGE, completion_tokens=9),
    )
    assert OutputChunk.from_pb(generation_pb2.GenerateResponse.FromString(chunk.to_pb().SerializeToString())) == chunk


def test_jobs_travel() -> None:
    samples = (
        SampleInfo(num_tokens=3, finish_reason=FinishReason.STOP, matched_stop="x", usage=USAGE),
        SampleInfo(num_tokens=2),
    )
    created_at = datetime.now(UTC)
    job = JobInfo(job_id="a", state=JobState.RUNNING, created_at=created_at, num_tokens=5, samples=samples)
    page = JobPage(jobs=(job, replace(job, error="lost")), next_page_token="7")
    assert JobPage.from_pb(generation_pb2.ListJobsResponse.FromString(page.to_pb().SerializeToString())) == page


def test_the_usage_of_samples_together() -> None:
    other = replace(
        USAGE,
        completion_tokens=3,
        total_draft_tokens=4,
        total_accepted_tokens=1,
        num_verify_steps=1,
        mean_accept_length=2.0,
        accepted_per_position=(1, 0),
        seed=5,
        queue_seconds=0.125,
        time_to_first_token_seconds=0.75,
        end_to_end_seconds=1.5,
        mean_inter_token_latency_seconds=0.125,
        cached_tokens=1,
    )
    assert Usage.together([USAGE, other]) == Usage(
        prompt_tokens=3,
        completion_tokens=8,
        total_draft_tokens=12,
        total_accepted_tokens=4,
        num_verify_steps=3,
        mean_accept_length=1 + 4 / 3,
        accepted_per_position=(3, 1, 0, 0),
        seed=2**64 - 1,
        queue_seconds=0.125,
        time_to_first_token_seconds=0.5,
        end_to_end_seconds=2.5,
        mean_inter_token_latency_seconds=(4 * 0.5 + 2 * 0.125) / 6,
        cached_tokens=2,
    )
    assert Usage.together([other]) == other


def test_samples_that_never_began_have_no_first_token() -> None:
    never_began = Usage(
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
    assert Usage.together([never_began, USAGE]) == replace(USAGE, seed=8, cached_tokens=0)
    assert Usage.together([never_began, never_began]) == never_began


def test_nothing_took_nothing() -> None:
    nothing = replace(
        USAGE,
        completion_tokens=0,
        num_verify_steps=0,
        total_accepted_tokens=0,
        accepted_per_position=(),
        mean_inter_token_latency_seconds=0.0,
    )
    together = Usage.together([nothing, replace(nothing, completion_tokens=1)])
    assert (together.mean_accept_length, together.mean_inter_token_latency_seconds) == (1.0, 0.0)
