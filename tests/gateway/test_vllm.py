"""VllmEngine over a real connection, with a fake loop behind the manager: as SMG calls it."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from slipstream.client import AsyncClient
from slipstream.common.errors import UnavailableError
from slipstream.common.wire.job import JobState
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.gateway.keys import KeyFile, KeyInterceptor
from slipstream.protos import scheduler_pb2
from tests.harness.example_states import CONTEXT_TOKENS, STATE, VOCAB_SIZE
from tests.harness.generation_server import GenerationServer, generation_server, state_of
from tests.harness.scripted_scheduler import EOS_ID, logprobs_of
from tests.harness.waiting import until

PROMPT = [20, 30, 40, 50, 60]
"""Its tokens are the output, again and again."""


@asynccontextmanager
async def engine(server: GenerationServer) -> AsyncIterator[Any]:
    """A stub for the server's engine."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


@pytest.fixture
async def stub(server: GenerationServer) -> AsyncIterator[Any]:
    """Connected to `server`."""
    async with engine(server) as connected:
        yield connected


def request(*, stream: bool = False, request_id: str = "cmpl-1", **params: Any) -> pb.GenerateRequest:
    """A request of token ids."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="for logs", input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 7} | params),
        stream=stream,
    )


async def answers(stub: Any, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """All messages of a call."""
    return [response async for response in stub.Generate(message)]


async def refused(stub: Any, message: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    """The status of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await answers(stub, message)
    return failure.value.code(), failure.value.details() or ""


async def spec_of(server: GenerationServer, stub: Any, message: pb.GenerateRequest) -> SequenceSpec:
    """The sequence that a request is turned into; it is cancelled then."""
    server.loop.pause_tokens = 0
    call = stub.Generate(message)
    await until(lambda: len(server.loop.running) == 1)
    spec = server.loop.running[0].spec
    await stub.Abort(pb.AbortRequest(request_ids=[message.request_id]))
    assert (await call.read()).complete.finish_reason == "abort"
    return spec


async def test_a_stream_has_the_tokens_as_they_come_and_an_end(stub: Any) -> None:
    *chunks, last = await answers(stub, request(stream=True, max_tokens=70))
    tokens = [token for answer in chunks for token in answer.chunk.token_ids]
    assert tokens == PROMPT * 14
    assert all(answer.chunk.completion_tokens == len(answer.chunk.token_ids) for answer in chunks)
    assert {answer.chunk.prompt_tokens for answer in chunks} == {len(PROMPT)}
    assert not any(answer.chunk.HasField("output_logprobs") for answer in chunks)
    end = last.complete
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", len(PROMPT), 70)
    assert end.spec_draft_tokens >= end.spec_accepted_tokens > 0
    assert end.cached_tokens == len(PROMPT) // 2
    assert not end.output_ids  # they were in the chunks


async def test_without_a_stream_there_is_one_message_with_all_tokens(stub: Any) -> None:
    (answer,) = await answers(stub, request(max_tokens=70, logprobs=2))
    end = answer.complete
    assert list(end.output_ids) == PROMPT * 14
    assert (end.finish_reason, end.completion_tokens) == ("length", 70)
    expected = [logprobs_of(token, 2) for token in end.output_ids]
    assert list(end.output_logprobs.token_ids) == list(end.output_ids)
    assert list(end.output_logprobs.token_logprobs) == [logprobs.logprob for logprobs in expected]
    tops = [tuple(zip(top.token_ids, top.values, strict=True)) for top in end.output_logprobs.top_logprobs]
    assert tops == [logprobs.top for logprobs in expected]


async def test_logprobs_of_a_stream_are_those_of_each_chunk(stub: Any) -> None:
    *chunks, last = await answers(stub, request(stream=True, logprobs=0))
    assert [token for answer in chunks for token in answer.chunk.output_logprobs.token_ids] == (PROMPT * 2)[:7]
    assert not any(top.token_ids for answer in chunks for top in answer.chunk.output_logprobs.top_logprobs)
    assert not last.complete.HasField("output_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_each_sample_has_an_end_of_its_own(stub: Any, stream: bool) -> None:
    found = await answers(stub, request(stream=stream, n=3))
    ends = [answer.complete.index for answer in found if answer.HasField("complete")]
    assert (sorted(ends) if stream else ends) == [0, 1, 2]
    streamed = {answer.chunk.index for answer in found if answer.HasField("chunk")}
    assert streamed == ({0, 1, 2} if stream else set())


async def test_a_text_is_tokenized_here(server: GenerationServer, stub: Any) -> None:
    message = request()
    message.text = "Hello world"
    spec = await spec_of(server, stub, message)
    assert list(spec.prompt) == server.model.tokenizer.encode("Hello world")


async def test_the_stop_that_matched_is_named(server: GenerationServer, stub: Any) -> None:
    (by_token,) = await answers(stub, request(stop_token_ids=[40], request_id="a"))
    assert (by_token.complete.finish_reason, by_token.complete.matched_token_id) == ("stop", 40)
    assert list(by_token.complete.output_ids) == [20, 30, 40]
    text = server.model.tokenizer.decode([40])
    (by_text,) = await answers(stub, request(stop=[text], request_id="b"))
    assert (by_text.complete.finish_reason, by_text.complete.matched_stop_str) == ("stop", text)
    assert list(by_text.complete.output_ids) == [20, 30, 40]  # the gateway cuts the text


async def test_a_stop_string_does_not_count_before_the_least_length(server: GenerationServer, stub: Any) -> None:
    text = server.model.tokenizer.decode([40])
    (answer,) = await answers(stub, request(stop=[text], min_tokens=4, max_tokens=20))
    assert list(answer.complete.output_ids) == (PROMPT * 2)[: PROMPT.index(40) + len(PROMPT) + 1]
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", text)


async def test_a_stop_string_is_found_in_a_text_that_continues_the_prompt() -> None:
    async with generation_server(kind="llama") as server, engine(server) as stub:
        hello = server.model.tokenizer.convert_tokens_to_ids("▁Hello")
        message = request(stop=[" Hello"])
        message.tokenized.input_ids[:] = [hello]
        (answer,) = await answers(stub, message)
        assert list(answer.complete.output_ids) == [hello]


async def test_the_original_text_is_only_for_people(server: GenerationServer, stub: Any) -> None:
    """The token ids are the prompt, whatever it says, and no text is one without them."""
    message = request()
    message.tokenized.original_text = "Hello world"
    assert list((await spec_of(server, stub, message)).prompt) == PROMPT
    message.request_id = "without-ids"
    message.tokenized.ClearField("input_ids")
    status, details = await refused(stub, message)
    assert (status, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "tokenized.input_ids: got 'no tokens', accepted: at least one token",
    )


async def test_every_sampling_parameter_counts(server: GenerationServer, stub: Any) -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "frequency_penalty": 1.5,
        "presence_penalty": -1.5,
        "repetition_penalty": 1.25,
    }
    message = request(
        **values, seed=-3, logit_bias={7: 2.5}, max_tokens=90, min_tokens=4, logprobs=3, stop_token_ids=[9]
    )
    message.sampling_params.skip_special_tokens = True
    spec = await spec_of(server, stub, message)
    expected = SamplingParams(seed=2**64 - 3, logit_bias=((7, 2.5),), **values)
    assert {name: getattr(spec.sampling, name) for name in (*values, "seed", "logit_bias")} == {
        name: getattr(expected, name) for name in (*values, "seed", "logit_bias")
    }
    assert (spec.max_new_tokens, spec.top_logprobs, spec.stop_token_ids) == (90, 3, {9, EOS_ID})
    assert set(spec.sampling.masked_token_ids) == {9, EOS_ID}  # until there are `min_tokens`


async def test_fields_that_are_not_set_have_the_defaults_of_openai(server: GenerationServer, stub: Any) -> None:
    message = pb.GenerateRequest(request_id="x", tokenized=pb.TokenizedInput(input_ids=PROMPT))
    spec = await spec_of(server, stub, message)
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert spec.max_new_tokens == CONTEXT_TOKENS - len(PROMPT)
    assert spec.stop_token_ids == {EOS_ID}
    message.sampling_params.ignore_eos = True
    message.request_id = "y"
    assert not (await spec_of(server, stub, message)).stop_token_ids


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"min_tokens": 8}, "sampling_params.min_tokens"),
        ({"n": 17}, "sampling_params.n"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"logprobs": 21}, "sampling_params.logprobs"),
        ({"prompt_logprobs": 0}, "sampling_params.prompt_logprobs"),
        ({"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling_params.logit_bias"),
        ({"stop": [""]}, "sampling_params.stop[0]"),
        ({"stop_token_ids": [5, VOCAB_SIZE]}, "sampling_params.stop_token_ids[1]"),
        ({"truncate_prompt_tokens": -1}, "sampling_params.truncate_prompt_tokens"),
        ({"json_object": False}, "sampling_params.json_object"),
        ({"regex": "a+"}, "sampling_params.regex"),
        ({"choice": pb.ChoiceConstraint(choices=["a"])}, "sampling_params.choice"),
        ({"grammar_from_first_token": True}, "sampling_params.grammar_from_first_token"),
    ],
    ids=str,
)
async def test_a_parameter_that_cannot_be_honoured_is_refused_by_its_name(
    stub: Any, params: dict[str, Any], field: str
) -> None:
    code, details = await refused(stub, request(**params))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{field}: got ")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokenized": pb.TokenizedInput()}, "tokenized.input_ids"),
        ({"tokenized": pb.TokenizedInput(input_ids=[5, VOCAB_SIZE])}, "tokenized.input_ids[1]"),
        ({"tokenized": pb.TokenizedInput(input_ids=[5] * CONTEXT_TOKENS)}, "tokenized.input_ids"),
        ({}, "input"),
        ({"text": "a", "request_id": "no spaces"}, "request_id"),
        ({"text": "a", "mm_inputs": pb.MultimodalInputs(im_token_id=1)}, "mm_inputs"),
        ({"text": "a", "kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"text": "a", "data_parallel_rank": 0}, "data_parallel_rank"),
    ],
    ids=str,
)
async def test_a_request_that_cannot_be_honoured_is_refused_by_the_field(
    stub: Any, fields: dict[str, Any], field: str
) -> None:
    code, details = await refused(stub, pb.GenerateRequest(**fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{field}: got ")


async def test_a_field_of_a_later_version_is_refused(stub: Any) -> None:
    later = pb.GenerateRequest.FromString(request().SerializeToString() + b"\xf8\x3f\x01")  # field 1023
    code, details = await refused(stub, later)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("1023: ")


async def test_an_abort_stops_the_work(server: GenerationServer, stub: Any) -> None:
    server.loop.pause_tokens = 6
    found, aborted = [], pb.AbortRequest(request_ids=["of another engine", "cmpl-7", "cmpl-7"])
    async for answer in stub.Generate(request(stream=True, request_id="cmpl-7", max_tokens=1000)):
        found.append(answer)
        if answer.chunk.completion_tokens:
            await stub.Abort(aborted)
    assert found[-1].complete.finish_reason == "abort"
    assert 0 < found[-1].complete.completion_tokens <= 6
    await server.manager.wait_idle()
    assert {sequence.spec.job_id for sequence in server.loop.cancelled} == {"cmpl-7"}


async def test_a_call_that_ends_stops_the_work(server: GenerationServer, stub: Any) -> None:
    server.loop.pause_tokens = 6
    call = stub.Generate(request(stream=True, max_tokens=1000))
    await call.read()
    call.cancel()
    await server.manager.wait_idle()
    assert len(server.loop.cancelled) == 1


async def test_a_request_is_a_job_that_other_clients_see(server: GenerationServer, stub: Any) -> None:
    server.loop.pause_tokens = 6
    call = stub.Generate(request(request_id="cmpl-9", max_tokens=1000))
    await until(lambda: len(server.loop.running) == 1)
    async with AsyncClient(server.address) as client:
        await state_of(client, "cmpl-9", JobState.RUNNING)
        await client.cancel_job("cmpl-9")
    assert (await call.read()).complete.finish_reason == "abort"


async def test_health_is_that_of_the_server(server: GenerationServer, stub: Any) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    server.is_serving = False
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).message == "this server does not serve now"
    server.absence = UnavailableError("no workers")
    with pytest.raises(grpc.aio.AioRpcError, match="no workers"):  # SMG would ask it for its model
        await stub.HealthCheck(pb.HealthCheckRequest())
    assert (await refused(stub, request()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_the_model_and_the_server_are_described(stub: Any) -> None:
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.tokenizer_path, model.is_generation) == ("tiny", "/models/tiny", True)
    assert (model.max_context_length, model.vocab_size) == (CONTEXT_TOKENS, VOCAB_SIZE)
    assert list(model.eos_token_ids) == [EOS_ID]
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.active_requests, info.is_paused, info.max_num_seqs) == (0, False, STATE.num_slots)


async def test_loads_are_those_of_the_server(stub: Any) -> None:
    (load,) = (await stub.GetLoads(pb.GetLoadsRequest(include=["core", "queues"]))).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (16, 1600, 0.01)
    with pytest.raises(grpc.aio.AioRpcError, match="dp_rank: got 3"):
        await stub.GetLoads(pb.GetLoadsRequest(dp_rank=3))


async def test_the_tokenizer_is_sent_as_an_archive(tmp_path: Path) -> None:
    """Without weights, and equal each time; the digest of all chunks together is in the last."""
    files = {"config.json": b"{}", "tokenizer.json": random.Random(0).randbytes(3 * 2**20), "chat_template.jinja": b"x"}
    for name, content in {**files, "model.safetensors": b"weights", "notes.txt": b"no"}.items():
        (tmp_path / name).write_bytes(content)
    async with generation_server(tokenizer_path=str(tmp_path)) as server, engine(server) as stub:
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert len(chunks) > 3
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    whole = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(whole).hexdigest()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == files


async def test_a_changed_tokenizer_is_sent_as_it_is_now(tmp_path: Path) -> None:
    async with generation_server(tokenizer_path=str(tmp_path)) as server, engine(server) as stub:
        digests = []
        for identity in ("a", "b"):
            (tmp_path / "tokenizer.json").write_text(identity, encoding="utf-8")
            server.model.identity = identity
            digests += [chunk.sha256 async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert len({*digests}) == 2


async def test_the_pages_of_all_are_not_told_to_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("bob:bob-0123456789abcdef\n", encoding="utf-8")
    interceptor = KeyInterceptor(KeyFile(tmp_path / "keys")).optional()
    async with generation_server(interceptors=(interceptor,)) as server, engine(server) as stub:
        server.loop.page_changes = [scheduler_pb2.PageChanges()]
        asked = common_pb2.SubscribeKvEventsRequest()
        # This user's own router, at the private address, has none.
        assert (await stub.SubscribeKvEvents(asked).read()).snapshot.count == 1
        key = (("authorization", "Bearer bob-0123456789abcdef"),)
        with pytest.raises(grpc.aio.AioRpcError, match="the prompts of all keys") as failure:
            await stub.SubscribeKvEvents(asked, metadata=key).read()
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_changes_of_the_prefix_cache_follow_a_snapshot(server: GenerationServer, stub: Any) -> None:
    first, second = 2**63 + 5, 7
    known = scheduler_pb2.PageChanges(
        changes=[
            scheduler_pb2.PageChange(key=first, token_ids=[1, 2]),
            scheduler_pb2.PageChange(key=second, parent=first, token_ids=[3, 4]),
        ]
    )
    later = scheduler_pb2.PageChanges(changes=[scheduler_pb2.PageChange(key=second)])
    server.loop.page_changes = [known, scheduler_pb2.PageChanges(), later, scheduler_pb2.PageChanges()]
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=9))
    snapshot, change = await call.read(), await call.read()
    assert (snapshot.snapshot.index, snapshot.snapshot.count, snapshot.snapshot.blocks) == (0, 1, 2)
    cleared, *stored = snapshot.events
    assert cleared.HasField("cleared")
    blocks = [event.stored.blocks[0] for event in stored]
    assert [(block.block_hash, list(block.token_ids)) for block in blocks] == [(first - 2**64, [1, 2]), (7, [3, 4])]
    assert {block.block_size for block in blocks} == {STATE.page_tokens}
    assert [event.stored.parent_block_hash for event in stored] == [0, first - 2**64]
    assert [event.stored.HasField("parent_block_hash") for event in stored] == [False, True]
    assert list(change.events[0].removed.block_hashes) == [7]
    assert change.sequence_number == snapshot.sequence_number + 1
    with pytest.raises(grpc.aio.AioRpcError, match="gone with its epoch") as failure:
        await call.read()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    server.loop.page_changes = None
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read()
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_calls_that_are_not_served_are_unimplemented(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Embed(pb.EmbedRequest(request_id="x"))
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
