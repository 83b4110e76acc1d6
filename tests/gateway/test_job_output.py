"""Tests that a sample's output does not depend on when it is read, nor on ends after which it goes on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.wire.job import FinishReason, OutputChunk, TokenLogprobs
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.gateway.request import CheckedRequest
from slipstream.gateway.sample import Sample
from slipstream.gateway.text import Vocabulary
from tests.harness.sampling import examples
from tests.harness.tokenizers_by_kind import make_tokenizer

MAX_ID = 345
ENDS = (*FinishReason, None)


def output_of(kind: str, stop: tuple[str, ...]) -> Sample:
    """The output of a sample of a job with logprobs."""
    spec = SequenceSpec(
        job_id="a",
        prompt=(5,),
        max_new_tokens=100,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        top_logprobs=0,
    )
    request = CheckedRequest(job_id="a", digest=b"", samples=(spec,), stop=stop, min_new_tokens=2)
    return Sample(request, Vocabulary(make_tokenizer(kind)))


Step = tuple[list[int], FinishReason | None]


def steps_of(tokens: list[list[int]], end: FinishReason | None, *, ends_with_token: bool) -> list[Step]:
    """Outputs of consecutive steps; the last carries the finish reason, unless `end` is None."""
    steps: list[Step] = [(ids, None) for ids in tokens]
    if end is None:
        return steps
    return [*steps[:-1], (tokens[-1], end)] if ends_with_token else [*steps, ([], end)]


def add(output: Sample, step: Step) -> None:
    """Adds a step."""
    ids, end = step
    output.add(ids, 0, tuple(TokenLogprobs(-token) for token in ids), end)


def read_all(output: Sample, chunks: list[OutputChunk]) -> None:
    """Adds what is new."""
    chunk = output.read(sum(len(chunk.token_ids) for chunk in chunks))
    if chunk is not None:
        chunks.append(OutputChunk.from_pb(chunk))


def seen_in(chunks: list[OutputChunk]) -> tuple[object, ...]:
    """Joins the chunks of a sample: its tokens, text, text lengths, logprobs and ends."""
    return (
        [token for chunk in chunks for token in chunk.token_ids],
        "".join(chunk.text for chunk in chunks),
        [length for chunk in chunks for length in chunk.text_lengths],
        [logprobs.logprob for chunk in chunks for logprobs in chunk.logprobs],
        [(chunk.finish_reason, chunk.matched_stop) for chunk in chunks if chunk.finish_reason is not None],
    )


@pytest.mark.parametrize("kind", ["byte level", "llama", "suffix"])
def test_output_does_not_depend_on_when_it_is_read(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    letters = st.text(alphabet="abcdeé你 ", min_size=1, max_size=8).map(tokenizer.encode)
    any_tokens = st.lists(st.integers(0, MAX_ID), min_size=1, max_size=5)

    @settings(max_examples=examples(200), deadline=None)
    @given(
        tokens=st.lists(st.one_of(letters, any_tokens), min_size=1, max_size=8),
        end=st.sampled_from(ENDS),
        ends_with_token=st.booleans(),
        stop=st.lists(st.text(alphabet="abcde ", min_size=1, max_size=3), max_size=2).map(tuple),
        is_read=st.lists(st.booleans(), min_size=9, max_size=9),
        reopened_after=st.integers(0, 9),
    )
    def check(
        tokens: list[list[int]],
        end: FinishReason | None,
        ends_with_token: bool,
        stop: tuple[str, ...],
        is_read: list[bool],
        reopened_after: int,
    ) -> None:
        steps = steps_of(tokens, end, ends_with_token=ends_with_token)
        whole, parts = output_of(kind, stop), output_of(kind, stop)
        expected: list[OutputChunk] = []
        seen: list[OutputChunk] = []
        for number, step in enumerate(steps):
            add(whole, step)
            if number == reopened_after and not parts.is_cut:
                # Ends, and goes on from the output that it has.
                add(parts, ([], FinishReason.ABORT))
                assert parts.go_on(Vocabulary(tokenizer), number=2)
            add(parts, step)
            if is_read[number]:
                read_all(parts, seen)
        read_all(whole, expected)
        # Nothing comes after the end.
        if not seen or seen[-1].finish_reason is None:
            read_all(parts, seen)
        assert seen_in(seen) == seen_in(expected)
        assert (parts.is_cut, parts.finish_reason) == (whole.is_cut, whole.finish_reason)

    check()
