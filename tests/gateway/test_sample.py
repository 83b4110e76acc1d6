"""A sample's output: what is read does not depend on when, nor on the way, nor on ends after which it goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.wire.job import FinishReason, OutputChunk, PlainChunkEncoder, TokenLogprobs
from slipstream.common.wire.messages import VARINTS
from slipstream.gateway.sample import MAX_SHARED_TOKENS, Sample
from slipstream.gateway.text import Vocabulary
from slipstream.protos import generation_pb2
from tests.harness.samples import read, sample_of
from tests.harness.sampling import examples
from tests.harness.tokenizers_by_kind import make_tokenizer

MAX_ID = 345
ENDS = (*FinishReason, None)


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
    if (chunk := read(output, sum(len(chunk.token_ids) for chunk in chunks))) is not None:
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
        whole, parts = (sample_of(kind, stop, min_new_tokens=2, top_logprobs=0) for _ in range(2))
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


MAX_ID = 345
WORD = st.integers(0, 2**32 - 1)
LONG = st.integers(0, 2**64 - 1)


@settings(max_examples=examples(300), deadline=None)
@given(
    job_id=st.text(max_size=200),
    sample_index=WORD,
    attempt=LONG,
    offset=LONG,
    tokens=st.lists(st.tuples(WORD, st.booleans(), WORD), min_size=1, max_size=60),
    text=st.text(),
    published_ns=LONG,
)
def test_bytes_are_those_of_protobuf(
    job_id: str,
    sample_index: int,
    attempt: int,
    offset: int,
    tokens: list[tuple[int, bool, int]],
    text: str,
    published_ns: int,
) -> None:
    token_ids, is_draft, lengths = zip(*tokens, strict=True)
    chunk = OutputChunk(
        job_id=job_id,
        token_offset=offset,
        token_ids=token_ids,
        text=text,
        is_draft=is_draft,
        text_lengths=lengths,
        sample_index=sample_index,
        attempt=attempt,
        published_ns=published_ns,
    )
    encoder = PlainChunkEncoder(job_id, sample_index, attempt)
    encoded = encoder.encode(offset, token_ids, text, bytes(is_draft), lengths, published_ns)
    assert encoded == chunk.to_pb().SerializeToString(deterministic=True)
    assert OutputChunk.from_pb(generation_pb2.GenerateResponse.FromString(encoded)) == chunk


def test_times_take_no_room_of_what_comes_again() -> None:
    encoder = PlainChunkEncoder("a", 0, 0)
    sizes = set()
    for published_ns in range(10**18, 10**18 + 100):
        encoder.encode(0, [5], "x", b"\0", [1], published_ns)
        sizes.add(len(VARINTS))
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", ["byte level", "llama", "suffix"])
@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, MAX_ID), min_size=1, max_size=5), min_size=1, max_size=8),
    num_accepted=st.integers(0, 5),
    ways=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_both_ways_to_read_agree(kind: str, steps: list[list[int]], num_accepted: int, ways: Sequence[bool]) -> None:
    """Also where readers take turns with them."""
    mixed, plain = sample_of(kind), sample_of(kind)
    offset = 0
    for number, (token_ids, is_encoded) in enumerate(zip(steps, ways, strict=False)):
        for output in (mixed, plain):
            output.add(token_ids, num_accepted, published_ns=number)
        expected = plain.read(offset)
        assert expected is not None
        encoded = mixed.read_encoded(offset) if is_encoded else None
        if is_encoded:
            assert encoded == expected.SerializeToString(deterministic=True)
            assert mixed.read_encoded(offset) is encoded, "readers at the same place share it"
        else:
            assert mixed.read(offset) == expected
        offset += len(token_ids)
        assert mixed.read_encoded(offset) is None
    for output in (mixed, plain):
        output.add((), reason=FinishReason.ABORT)
    assert mixed.read_encoded(offset) is None, "the end has more to say"
    plain.usage = mixed.usage  # but for its times
    assert mixed.read(offset) == plain.read(offset)
    assert mixed.read(0) == plain.read(0)


def test_other_samples_are_read_as_objects() -> None:
    for output in (sample_of(stop=("x",)), sample_of(top_logprobs=0)):
        output.add((5,))
        assert output.read_encoded(0) is None
    late = sample_of()
    late.add([5] * (MAX_SHARED_TOKENS + 1))
    assert late.read_encoded(0) is None, "so much would be kept for as long as the sample is"
    assert late.read_encoded(1) is None, "the tokens before are not text yet"
