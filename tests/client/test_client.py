"""The client against servers that do not behave, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.client.requests import OutputReader, RequestOptions
from slipstream.common.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from slipstream.common.wire.job import FinishReason, OutputChunk
from slipstream.protos import generation_pb2, generation_pb2_grpc
from tests.harness.example_states import USAGE
from tests.harness.grpc_server import running_server, unserved_address
from tests.harness.waiting import DEADLINES_S

NAME = "slipstream.v1.Generation"
FIRST = OutputChunk(
    job_id="a", token_offset=0, token_ids=(5, 6), text="hé", is_draft=(True, False), text_lengths=(1, 1)
)
LAST = OutputChunk(job_id="a", token_offset=2, finish_reason=FinishReason.LENGTH, usage=USAGE, job_usage=USAGE)


class Script(generation_pb2_grpc.GenerationServicer):
    """Sends chunks, and then waits for ever if it is told to."""

    def __init__(self, *chunks: OutputChunk, is_endless: bool = False) -> None:
        self.chunks = chunks
        self.is_endless = is_endless
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.closed = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """See generation.proto."""
        self.requests.append(request)
        try:
            for chunk in self.chunks:
                yield chunk.to_pb()
            if self.is_endless:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


@asynccontextmanager
async def client_of(servicer: Script) -> AsyncIterator[AsyncClient]:
    """A client of a server that follows a script."""
    service = (NAME, generation_pb2_grpc.add_GenerationServicer_to_server, servicer)
    async with running_server(service) as server, AsyncClient(server.address) as client:
        yield client


async def test_chunks_arrive_as_they_were_sent() -> None:
    async with client_of(Script(FIRST, LAST)) as client:
        assert [chunk async for chunk in client.generate("a")] == [FIRST, LAST]


async def test_what_is_not_set_is_not_sent() -> None:
    script = Script(FIRST, LAST)
    async with client_of(script) as client:
        async for _ in client.generate("text"):
            pass
        async for _ in client.generate([1, 2], temperature=0.0, seed=0, stop_token_ids=[3], ignore_eos=True):
            pass
    text, ids = script.requests
    assert text == generation_pb2.GenerateRequest(text="text", sampling_params={})
    assert list(ids.input_ids.ids) == [1, 2]
    assert {field.name for field, _ in ids.sampling_params.ListFields()} == {
        "temperature",
        "seed",
        "stop_token_ids",
        "ignore_eos",
    }


async def test_everything_that_is_asked_for_is_sent() -> None:
    script = Script(FIRST, LAST)
    sampling: RequestOptions = {
        "min_new_tokens": 1,
        "n": 2,
        "stop": ["x", "yz"],
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {3: -1.5},
        "logprobs": True,
        "top_logprobs": 4,
    }
    conversation = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    async with client_of(script) as client:
        async for _ in client.generate(conversation, speculation=True, max_draft_tokens=2, priority=3, **sampling):
            pass
        async for _ in client.generate("a", stop="xyz", speculation=False, max_draft_tokens=None):
            pass
    everything, little = script.requests
    assert everything == generation_pb2.GenerateRequest(
        job_id=everything.job_id,
        messages={"items": conversation},
        sampling_params={**sampling},
        speculation={"enabled": True, "max_draft_tokens": 2},
        priority=3,
    )
    assert list(little.sampling_params.stop) == ["xyz"]
    assert little.speculation == generation_pb2.Speculation(enabled=False)


async def test_the_stream_ends_with_the_last_sample() -> None:
    other = OutputChunk(job_id="a", token_offset=0, token_ids=(5,), sample_index=1)
    ends = [replace(LAST, job_usage=None), replace(LAST, token_offset=1, sample_index=1)]
    async with client_of(Script(FIRST, other, *ends)) as client:
        assert [chunk async for chunk in client.generate("a", n=2)] == [FIRST, other, *ends]
    async with client_of(Script(FIRST, other, ends[0])) as client:
        with pytest.raises(ConnectionLostError, match="before the job did"):
            async for _ in client.generate("a", n=2, reconnect_s=0):
                pass
    for wrong in (replace(other, token_offset=2), replace(FIRST, sample_index=1, token_offset=1)):
        async with client_of(Script(FIRST, wrong, is_endless=True)) as client:
            chunks = client.generate("a", n=2)
            assert await anext(chunks) == FIRST
            with pytest.raises(InternalError, match="token 0 of sample 1 was expected"):
                await anext(chunks)


def test_an_end_that_is_told_again_is_not_repeated() -> None:
    """Another call begins with the ends of the samples that are over: here that of sample 0 came before."""
    reader = OutputReader()
    end = replace(LAST, job_usage=None)
    assert [reader.read(chunk.to_pb()) for chunk in (FIRST, end)] == [FIRST, end]
    assert reader.watch_request("a") == generation_pb2.WatchJobRequest(job_id="a", from_token=2)
    other = OutputChunk(job_id="a", token_offset=0, token_ids=(5,), sample_index=2)
    assert [reader.read(chunk.to_pb()) for chunk in (end, other)] == [None, other]
    assert reader.watch_request("a") == generation_pb2.WatchJobRequest(job_id="a", from_tokens=[2, 0, 1])
    assert not reader.is_over
    # The server cannot know which sample's end came last.
    expected = OutputChunk(job_id="a", token_offset=2, job_usage=USAGE, attempt=3)
    assert reader.read(replace(LAST, attempt=3).to_pb()) == expected
    assert reader.is_over
    with pytest.raises(InternalError):
        reader.read(replace(FIRST, token_offset=2).to_pb())


@pytest.mark.parametrize("offset", [0, 1, 3])
async def test_a_gap_or_a_repetition_is_seen(offset: int) -> None:
    wrong = OutputChunk(job_id="a", token_offset=offset, token_ids=(7,))
    async with client_of(Script(FIRST, wrong, is_endless=True)) as client:
        chunks = client.generate("a")
        assert await anext(chunks) == FIRST
        with pytest.raises(InternalError, match=f"token 2 was expected, token {offset} arrived"):
            await anext(chunks)


async def test_a_stream_that_ends_too_early_is_an_error() -> None:
    async with client_of(Script(FIRST)) as client:
        chunks = client.generate("a", reconnect_s=0)
        assert await anext(chunks) == FIRST
        with pytest.raises(UnavailableError, match="before the job did"):
            await anext(chunks)


async def test_a_loop_that_is_left_cancels_the_job() -> None:
    script = Script(FIRST, is_endless=True)
    async with client_of(script) as client:
        chunks = client.generate("a")
        assert await anext(chunks) == FIRST
        await chunks.aclose()
        await script.closed.wait()


async def test_the_time_of_a_call_has_an_end() -> None:
    script = Script(is_endless=True)
    async with client_of(script) as client:
        for timeout_s in DEADLINES_S:
            with pytest.raises(DeadlineExceededError):
                await anext(client.generate("a", timeout_s=timeout_s))
            if script.requests:
                break
        await script.closed.wait()


async def test_nobody_serves_there() -> None:
    with unserved_address() as address:
        async with AsyncClient(address) as client:
            with pytest.raises(UnavailableError):
                await client.server_info()


async def test_a_server_of_another_kind() -> None:
    async with client_of(Script()) as client:
        with pytest.raises(FailedPreconditionError, match="not implemented"):
            await client.server_info()


@pytest.mark.parametrize("params", [{"seed": -1}, {"max_new_tokens": 2**32}, {"stop_token_ids": ["a"]}, {"top_k": 0.5}])
async def test_what_does_not_fit_its_field_is_refused(params: Any) -> None:
    async with client_of(Script()) as client:
        (name, value), *_ = params.items()
        with pytest.raises(InvalidArgumentError) as caught:
            client.generate("a", temperature=1, **params)
        assert str(caught.value).startswith(f"sampling_params.{name}: got {value!r}, accepted: ")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([-1], {}, r"input_ids\.ids: got \[-1\], accepted: a list of whole numbers of 0 to 2\^32 - 1"),
        ([{"role": "user", "text": "a"}], {}, r"messages\.items\[0\]\.text: there is no such field"),
        ([{"role": "user"}, {"role": 5}], {}, r"messages\.items\[1\]\.role: got 5, accepted: a text"),
        (b"text", {}, "prompt: got b'text', accepted: a text, token ids, or a conversation"),
        (None, {}, "prompt: got None"),
        ({"role": "user", "content": "a"}, {}, "prompt: got {'role'"),
        ("a", {"temprature": 1}, r"sampling_params\.temprature: there is no such field"),
        ("a", {"temperature": "hot"}, r"sampling_params\.temperature: got 'hot', accepted: a number"),
        ("a", {"stop": [5]}, r"sampling_params\.stop: got \[5\], accepted: a list of texts"),
        ("a", {"logit_bias": {"a": 1}}, r"sampling_params\.logit_bias: got {'a': 1}, accepted: a mapping"),
        ("a", {"speculation": "no"}, r"speculation\.enabled: got 'no', accepted: true or false"),
        ("a", {"priority": 2**31}, r"priority: got 2147483648, accepted: a whole number of -2\^31 to 2\^31 - 1"),
    ],
)
async def test_what_does_not_fit_is_refused_by_its_name(prompt: Any, options: Any, message: str) -> None:
    async with client_of(Script()) as client:
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            client.generate(prompt, **options)


async def test_errors_keep_the_call_s_own_as_their_cause() -> None:
    async with client_of(Script()) as client:
        with pytest.raises(FailedPreconditionError) as caught:
            await client.cancel_job("a")
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
