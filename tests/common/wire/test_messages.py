"""Messages come out the same on the other side; what makes no sense is refused by field; usage adds up over samples."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from slipstream.common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.wire.job import (
    AbortCause,
    FinishReason,
    JobInfo,
    JobPage,
    JobState,
    OutputChunk,
    SampleInfo,
    TokenLogprobs,
    Usage,
)
from slipstream.common.wire.sequence import PackedStep, Refusal, SamplingParams, SequenceSpec, StepOutput
from slipstream.common.wire.server import (
    DraftFigures,
    DraftSwap,
    SchedulerDescription,
    SchedulerState,
    SwapOutcome,
    SwapTerms,
)
from slipstream.protos import generation_pb2, scheduler_pb2
from tests.harness.example_states import STATE, USAGE

SPEC = SequenceSpec(
    job_id="job",
    prompt=(1, 2, 3),
    output=(4, 5),
    max_new_tokens=9,
    sampling=SamplingParams(temperature=0.5, seed=2**64 - 1, logit_bias=((3, -1.0), (7, 2.0)), masked_before=4),
    stop_token_ids=frozenset({9, 2}),
    top_logprobs=0,
    max_draft_tokens=0,
    grammar='{"grammars": [{"json_schema": {"type": "object"}}]}',
    priority=-3,
    arrival=12,
    deadline_ns=2**63,
    cache_salt="a tenant",
)


def test_a_sequence_comes_out_the_same() -> None:
    message = scheduler_pb2.NewSequence.FromString(SPEC.to_pb(5, 7).SerializeToString())
    assert (message.id, message.epoch) == (5, 7)
    assert SequenceSpec.from_pb(message) == SPEC


def test_fields_that_are_not_set_stay_unset() -> None:
    spec = SequenceSpec(job_id="", prompt=(1,), max_new_tokens=1, sampling=SamplingParams(), stop_token_ids=frozenset())
    assert SequenceSpec.from_pb(spec.to_pb(1, 1)) == spec


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"max_new_tokens": 2}, "max_new_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"grammar": "x" * (2**20 + 1)}, "grammar"),
    ],
)
def test_a_sequence_that_makes_no_sense_is_refused_by_field(change: dict[str, object], field: str) -> None:
    message = SPEC.to_pb(1, 1)
    for name in change:
        message.ClearField(name)
    message.MergeFrom(scheduler_pb2.NewSequence(**change))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as refused:
        SequenceSpec.from_pb(message)
    assert refused.value.field.endswith(field)


def test_an_output_comes_out_the_same() -> None:
    output = StepOutput(
        sequences=[3, 4, 2**63],
        num_tokens=[2, 0, 1],
        num_accepted=[1, 0, 4],
        finish_reasons=[None, FinishReason.ABORT, FinishReason.STOP],
        tokens=[7, 8, 9],
        num_draft_tokens=4,
        published_ns=123,
        admitted=[3],
        admitted_ns=[100],
        logprobs={3: (TokenLogprobs(-1.5, ((7, -1.5), (1, -2.0))), TokenLogprobs(-0.25, ()))},
        cached_tokens={3: 16},
        is_beyond_draft=[False, False, True],
    )
    assert StepOutput.from_pb(scheduler_pb2.StepOutput.FromString(output.to_pb().SerializeToString())) == output
    packed = PackedStep(
        array("Q", output.sequences).tobytes(),
        array("I", output.num_tokens).tobytes(),
        array("I", output.num_accepted).tobytes(),
        bytes([0, 3, 1]),
        array("I", output.tokens).tobytes(),
        output.num_draft_tokens,
        output.published_ns,
        output.admitted,
        output.admitted_ns,
        output.logprobs,
        output.cached_tokens,
        bytes(output.is_beyond_draft),
    )
    assert packed.to_pb() == output.to_pb()
    assert packed._replace(is_beyond_draft=b"").to_pb() == replace(output, is_beyond_draft=[]).to_pb()


@pytest.mark.parametrize(
    "state",
    [
        SchedulerState(
            serving=SchedulerDescription(
                server=STATE,
                tokenizer_path="/m",
                eos_token_ids=(2, 3),
                max_sequences=8,
                most_draft_tokens=4,
                constraints=True,
            )
        ),
        SchedulerState(paused="the draft service is lost"),
        SchedulerState(paused="the models do not fit", is_final=True),
    ],
)
def test_a_state_comes_out_the_same(state: SchedulerState) -> None:
    assert SchedulerState.from_pb(state.to_pb()) == state


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("prompt", "()", "token ids"),
        ResourceExhaustedError("full", retry_after_ms=500),
        UnavailableError("gone", retry_after_ms=200),
        UnavailableError("changed"),
        DeadlineExceededError("late"),
        InternalError("it failed"),
    ],
)
def test_a_refusal_keeps_its_code_its_message_and_the_time_of_another_try(error: SlipstreamError) -> None:
    refusal = Refusal.from_pb(Refusal(6, error).to_pb())
    assert refusal.sequence == 6
    assert type(refusal.error) is type(error)
    assert str(error) in str(refusal.error)
    assert getattr(refusal.error, "retry_after_ms", None) == getattr(error, "retry_after_ms", None)


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
        abort_cause=AbortCause.DEADLINE,
    )
    assert OutputChunk.from_pb(generation_pb2.GenerateResponse.FromString(chunk.to_pb().SerializeToString())) == chunk


def test_jobs_travel() -> None:
    samples = (
        SampleInfo(num_tokens=3, finish_reason=FinishReason.STOP, matched_stop="x", usage=USAGE),
        SampleInfo(num_tokens=2),
    )
    created_at = datetime.now(UTC)
    job = JobInfo(job_id="a", state=JobState.RUNNING, created_at=created_at, num_tokens=5, samples=samples)
    jobs = (job, replace(job, error="lost"), replace(job, abort_cause=AbortCause.CANCELLED))
    page = JobPage(jobs=jobs, next_page_token="7")
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
