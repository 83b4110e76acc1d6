"""Messages between a gateway and the scheduler: everything that is sent comes out the same on the other side."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from slipstream.common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.wire.job import FinishReason, TokenLogprobs
from slipstream.common.wire.sequence import PackedStep, Refusal, SamplingParams, SequenceSpec, StepOutput
from slipstream.common.wire.server import SchedulerDescription, SchedulerState
from slipstream.protos import scheduler_pb2
from tests.harness.example_states import STATE

SPEC = SequenceSpec(
    job_id="job",
    prompt=(1, 2, 3),
    output=(4, 5),
    max_new_tokens=9,
    sampling=SamplingParams(temperature=0.5, seed=2**64 - 1, logit_bias=((3, -1.0), (7, 2.0)), masked_before=4),
    stop_token_ids=frozenset({9, 2}),
    top_logprobs=0,
    max_draft_tokens=0,
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
    ],
)
def test_a_sequence_that_makes_no_sense_is_refused_by_field(change: dict[str, object], field: str) -> None:
    message = SPEC.to_pb(1, 1)
    for name in change:
        message.ClearField(name)  # type: ignore[arg-type]
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
                server=STATE, tokenizer_path="/m", eos_token_ids=(2, 3), max_sequences=8, most_draft_tokens=4
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
