"""A request that goes on after the output of another server: tokens, text, stops, usage, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.client import AsyncClient
from slipstream.client.requests import job_request
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import FinishReason, OutputChunk
from slipstream.gateway.sample import Sample
from slipstream.gateway.text import Vocabulary
from slipstream.protos import generation_pb2, generation_pb2_grpc
from tests.harness.example_states import VOCAB_SIZE
from tests.harness.generation_server import GenerationServer, collect, generation_server, killed, text_of, tokens_of
from tests.harness.samples import read, request_of
from tests.harness.sampling import examples
from tests.harness.scripted_scheduler import EOS_ID
from tests.harness.tokenizers_by_kind import make_tokenizer

MAX_ID = 345
LENGTH = 9


async def continued(
    server: GenerationServer, prompt: str | list[int], *outputs: Sequence[int], sampled_with: int = 7, **options: Any
) -> list[OutputChunk]:
    """The stream of a request that goes on after the outputs of its samples."""
    request = job_request(generation_pb2.GenerateRequest, prompt, options.pop("job_id", ""), options)  # type: ignore[arg-type]
    request.continuation.seed = sampled_with
    for output in outputs:
        request.continuation.outputs.add(ids=output)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        try:
            return [OutputChunk.from_pb(message) async for message in stub.Generate(request)]
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None


@pytest.mark.parametrize("kind", ["byte level", "llama", "suffix"])
def test_the_text_after_any_cut_is_that_of_one_server(kind: str) -> None:
    """Also where a stop string, or a character, is under way at the cut."""

    @settings(max_examples=examples(150))
    @given(
        ids=st.lists(st.integers(0, MAX_ID), min_size=1, max_size=24),
        cut=st.integers(0, 24),
        marks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), max_size=3),
        num_ignored=st.integers(0, 6),
    )
    def check(ids: list[int], cut: int, marks: list[tuple[int, int]], num_ignored: int) -> None:
        vocabulary = Vocabulary(make_tokenizer(kind))
        text = vocabulary.decode(ids)
        stops = [stop for start, length in marks if (stop := text[start : start + length])]
        request = request_of(stops, min_new_tokens=num_ignored, max_new_tokens=len(ids))
        whole = Sample(request, vocabulary)
        whole.add(ids, reason=FinishReason.LENGTH)
        expected = read(whole, 0)
        assert expected is not None
        before = expected.token_ids[:cut]
        sample = Sample(replace(request, outputs=(before,)), vocabulary)
        if not sample.is_over:
            sample.add(ids[len(before) :], reason=FinishReason.LENGTH)
        rest = read(sample, len(before))
        assert rest is not None
        assert (rest.token_ids, rest.text) == (
            expected.token_ids[cut:],
            expected.text[sum(expected.text_lengths[:cut]) :],
        )
        assert (rest.finish_reason, rest.matched_stop) == (expected.finish_reason, expected.matched_stop)
        assert rest.usage is not None
        assert rest.usage.completion_tokens == len(rest.token_ids)

    check()


async def test_a_request_goes_on_after_its_output(server: GenerationServer, client: AsyncClient) -> None:
    whole = await collect(client.generate("Hello", max_new_tokens=LENGTH))
    tokens, lengths = tokens_of(whole), [length for chunk in whole for length in chunk.text_lengths]
    before = server.metric("generation_tokens_total")
    for cut in (1, 5, LENGTH - 1):
        rest = await continued(server, "Hello", tokens[:cut], max_new_tokens=LENGTH, job_id=f"cut-{cut}")
        assert (rest[0].token_offset, tokens_of(rest)) == (cut, tokens[cut:])
        assert text_of(rest) == text_of(whole)[sum(lengths[:cut]) :]
        sequence = server.loop.submitted[-1].spec
        assert (sequence.output, sequence.sampling.seed) == (tuple(tokens[:cut]), 7)
        usage = rest[-1].job_usage
        assert usage is not None
        assert (usage.completion_tokens, usage.seed) == (LENGTH - cut, 7)
        assert 0 <= usage.time_to_first_token_seconds <= usage.end_to_end_seconds < 60
        assert 0 <= usage.mean_inter_token_latency_seconds < 60
        watched = await collect(client.watch_job(f"cut-{cut}"))
        assert (tokens_of(watched), text_of(watched)) == (tokens, text_of(whole))
    assert server.metric("generation_tokens_total") - before == 3 * LENGTH - (1 + 5 + LENGTH - 1)
    assert server.metric("inter_token_latency_seconds_sum") < 60


async def test_each_sample_goes_on_after_its_own(server: GenerationServer) -> None:
    rest = await continued(server, [5, 6], [5, 6, 5, 6], [], [5] * LENGTH, n=4, max_new_tokens=LENGTH)
    by_sample = [[chunk for chunk in rest if chunk.sample_index == index] for index in range(4)]
    assert [tokens_of(chunks) for chunks in by_sample] == [[5, 6, 5, 6, 5], [5, 6] * 4 + [5], [], [5, 6] * 4 + [5]]
    assert [chunks[-1].finish_reason for chunks in by_sample] == ["length"] * 4
    assert rest[-1].job_usage is not None
    assert rest[-1].job_usage.completion_tokens == 5 + LENGTH + LENGTH


@pytest.mark.parametrize(
    ("output", "reason", "matched"),
    [([5] * LENGTH, "length", None), ([5, EOS_ID], "stop", EOS_ID), ([ord("a"), ord("b")], "stop", "ab")],
)
async def test_an_output_that_is_whole_ends_at_once(
    server: GenerationServer, output: list[int], reason: str, matched: int | str | None
) -> None:
    if isinstance(matched, str):
        output = [server.model.tokenizer.encode(character)[0] for character in matched]
    (end,) = await continued(server, [5], output, max_new_tokens=LENGTH, stop=["ab"])
    assert (end.token_ids, end.text, end.finish_reason, end.matched_stop) == ((), "", reason, matched)
    assert end.job_usage is not None
    assert end.job_usage.completion_tokens == 0
    assert not server.loop.submitted
    assert not server.manager.num_jobs


async def test_logprobs_of_other_servers_are_not_known(server: GenerationServer, client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = await collect(client.generate([5, 6], **options))
    rest = await continued(server, [5, 6], [5, 6], job_id="mine", **options)
    known = [one for chunk in whole for one in chunk.logprobs]
    assert [one for chunk in rest for one in chunk.logprobs] == known[2:]
    watched = [one for chunk in await collect(client.watch_job("mine")) for one in chunk.logprobs]
    assert all(math.isnan(value) for one in watched[:2] for value in (one.logprob, *dict(one.top).values()))
    assert watched[2:] == known[2:]


async def test_a_journal_keeps_what_was_continued(tmp_path: Path) -> None:
    async with generation_server(journal=tmp_path / "journal.sqlite3") as server:
        server.loop.pause_tokens = 6
        async with AsyncClient(server.address) as client:
            request = job_request(generation_pb2.CreateJobRequest, [5, 6], "mine", {"max_new_tokens": LENGTH})
            request.continuation.outputs.add(ids=[5, 6])
            await client._stub.CreateJob(request)
            async for chunk in client.watch_job("mine", 2):
                if chunk.token_ids:
                    break
            await server.manager.journal.flush()
        left = killed(tmp_path / "journal.sqlite3")
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert tokens_of(await collect(client.watch_job("mine"))) == [5, 6] * 4 + [5]
        usage = (await client.get_job("mine")).usage
        assert usage is not None
        assert usage.completion_tokens == LENGTH - 2


@pytest.mark.parametrize(
    ("outputs", "options", "field"),
    [
        ([[5], [5], [5]], {"n": 2}, "continuation.outputs"),
        ([[], [5, VOCAB_SIZE]], {"n": 2}, "continuation.outputs[1].ids[1]"),
        ([[EOS_ID, 5]], {}, "continuation.outputs[0].ids[0]"),
        ([[5] * (LENGTH + 1)], {}, "continuation.outputs[0].ids"),
        ([[5] * 5000], {}, "continuation.outputs[0].ids"),
        ([[], ["a", "b", "c"]], {"n": 2, "stop": ["ab"]}, "continuation.outputs[1].ids"),
        ([[5]], {"seed": 6}, "continuation.seed"),
    ],
)
async def test_what_no_server_can_have_generated_is_refused(
    server: GenerationServer, outputs: list[list[Any]], options: dict[str, Any], field: str
) -> None:
    ids = [
        [server.model.tokenizer.encode(one)[0] if isinstance(one, str) else one for one in output] for output in outputs
    ]
    with pytest.raises(InvalidArgumentError) as caught:
        await continued(server, [5], *ids, **{"max_new_tokens": LENGTH, **options})
    assert caught.value.field == field
    assert not server.manager.num_jobs
