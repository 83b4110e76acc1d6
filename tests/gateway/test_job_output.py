"""Tests that a sample's output does not depend on how its steps are bundled or when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.api.output_chunk import FinishReason, TokenLogprobs
from slipstream.common.api.sampling import SamplingParams
from slipstream.common.api.sequence import SequenceOutput, SequenceSpec
from slipstream.common.errors import UnavailableError
from slipstream.gateway.detokenizer import Vocabulary
from slipstream.gateway.sample import SampleOutput
from slipstream.gateway.validation import CheckedRequest
from tests.harness.tokenizers_by_kind import make_tokenizer

if TYPE_CHECKING:
    from slipstream.common.api.output_chunk import OutputChunk

MAX_ID = 345
ENDS = (*FinishReason, None)


def output_of(kind: str, stop: tuple[str, ...]) -> SampleOutput:
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
    return SampleOutput(request, Vocabulary(make_tokenizer(kind)).new_detokenizer())


def steps_of(tokens: list[list[int]], end: FinishReason | None, *, ends_with_token: bool) -> list[SequenceOutput]:
    """Outputs of consecutive steps; the last carries the finish reason, or an error if `end` is None."""
    ending = SequenceOutput(finish_reason=end, error=None if end is not None else UnavailableError("verify is gone"))
    steps = [SequenceOutput(token_ids=ids, logprobs=tuple(TokenLogprobs(-token) for token in ids)) for ids in tokens]
    if ends_with_token and end is not None:
        last = steps.pop()
        ending = SequenceOutput(token_ids=last.token_ids, logprobs=last.logprobs, finish_reason=end)
    return [*steps, ending]


def read_all(output: SampleOutput, chunks: list[OutputChunk]) -> None:
    """Adds what is new."""
    chunk = output.read(sum(len(chunk.token_ids) for chunk in chunks))
    if chunk is not None:
        chunks.append(chunk)


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
def test_bundles_of_steps_are_the_steps(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    letters = st.text(alphabet="abcdeé你 ", min_size=1, max_size=8).map(tokenizer.encode)
    any_tokens = st.lists(st.integers(0, MAX_ID), min_size=1, max_size=5)

    @settings(max_examples=200, deadline=None)
    @given(
        tokens=st.lists(st.one_of(letters, any_tokens), min_size=1, max_size=8),
        end=st.sampled_from(ENDS),
        ends_with_token=st.booleans(),
        stop=st.lists(st.text(alphabet="abcde ", min_size=1, max_size=3), max_size=2).map(tuple),
        is_bundle_end=st.lists(st.booleans(), min_size=9, max_size=9),
        is_read=st.lists(st.booleans(), min_size=9, max_size=9),
    )
    def check(
        tokens: list[list[int]],
        end: FinishReason | None,
        ends_with_token: bool,
        stop: tuple[str, ...],
        is_bundle_end: list[bool],
        is_read: list[bool],
    ) -> None:
        steps = steps_of(tokens, end, ends_with_token=ends_with_token)
        one_by_one, bundled = output_of(kind, stop), output_of(kind, stop)
        expected: list[OutputChunk] = []
        seen: list[OutputChunk] = []
        bundle: list[SequenceOutput] = []
        for number, step in enumerate(steps):
            assert one_by_one.add(step) is (step if step is steps[-1] else None)
            read_all(one_by_one, expected)
            bundle.append(step)
            if is_bundle_end[number] or step is steps[-1]:
                # Nothing comes after the end.
                late = [SequenceOutput(token_ids=[5], logprobs=(TokenLogprobs(-5),))] if step is steps[-1] else []
                assert bundled.add(*bundle, *late) is (step if step is steps[-1] else None)
                bundle = []
            if is_read[number]:
                read_all(bundled, seen)
        if not seen or seen[-1].finish_reason is None:
            read_all(bundled, seen)
        assert seen_in(seen) == seen_in(expected)
        assert (bundled.is_cut, bundled.finish_reason) == (one_by_one.is_cut, one_by_one.finish_reason)

    check()
