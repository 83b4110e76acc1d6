"""Samples of the gateway for tests: without a job, and without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.common.wire.job import OutputChunk
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.gateway.request import CheckedRequest
from slipstream.gateway.sample import Sample
from slipstream.gateway.text import Vocabulary
from tests.harness.tokenizers_by_kind import make_tokenizer


def request_of(
    stop: Sequence[str] = (), *, min_new_tokens: int = 0, top_logprobs: int | None = None, max_new_tokens: int = 1000
) -> CheckedRequest:
    """Makes a request for one sample."""
    spec = SequenceSpec(
        job_id="a",
        prompt=(70,),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        top_logprobs=top_logprobs,
    )
    return CheckedRequest(job_id="a", digest=b"a", samples=(spec,), stop=tuple(stop), min_new_tokens=min_new_tokens)


def sample_of(
    kind: str = "byte level", stop: Sequence[str] = (), *, min_new_tokens: int = 0, top_logprobs: int | None = None
) -> Sample:
    """Makes a sample of a request for a model with a tokenizer of this kind."""
    request = request_of(stop, min_new_tokens=min_new_tokens, top_logprobs=top_logprobs)
    return Sample(request, Vocabulary(make_tokenizer(kind)), attempt=7)


def read(sample: Sample, offset: int) -> OutputChunk | None:
    """Returns the chunk from `offset` on as plain data."""
    chunk = sample.read(offset)
    return None if chunk is None else OutputChunk.from_pb(chunk)
