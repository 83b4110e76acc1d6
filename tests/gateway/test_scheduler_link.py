"""A gateway whose scheduler comes and goes, is not there yet or is behind a broken connection: clients only wait."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from slipstream.bundled import target_dir
from slipstream.client import AsyncClient, Client
from slipstream.common.errors import FailedPreconditionError, InternalError, ResourceExhaustedError, UnavailableError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import JobState, OutputChunk
from slipstream.common.wire.sequence import SequenceSpec
from slipstream.gateway.scheduler import MAX_SEQUENCES_PER_MESSAGE, MAX_TOKENS_PER_MESSAGE
from slipstream.protos import generation_pb2 as pb
from slipstream.protos import generation_pb2_grpc
from tests.harness.breaking_proxy import BreakingProxy, breaking_proxy
from tests.harness.example_states import CONTEXT_TOKENS, STATE, TOKENS_PER_STEP
from tests.harness.gateway_processes import TIMEOUT_S, GatewayProcesses, gateway_processes
from tests.harness.generation_server import (
    GenerationServer,
    collect,
    generation_server,
    logprobs_in,
    state_of,
    text_of,
    tokens_of,
)
from tests.harness.samples import sample_of
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler, logprobs_of, serving
from tests.harness.tokenizers_by_kind import TEXT
from tests.harness.waiting import until


def break_stream(server: GenerationServer) -> None:
    """The scheduler dies, and another one is there at once."""
    server.loop.break_streams()


def pause_for_a_while(server: GenerationServer) -> None:
    """The scheduler loses its workers and attaches again."""
    server.loop.pause()
    server.loop.serve()


def attach_again(server: GenerationServer) -> None:
    """The scheduler attaches to its workers without a word about a pause."""
    server.loop.serve()


def end_outage(server: GenerationServer) -> None:
    """The outage has taken too long, from now on."""
    server.link._outage_timeout_s = 0.0
    server.link._expire()


@pytest.mark.parametrize("disturb", [break_stream, pause_for_a_while, attach_again])
async def test_streams_go_on_with_the_next_token(
    server: GenerationServer, client: AsyncClient, disturb: Callable[[GenerationServer], None]
) -> None:
    prompt = server.model.tokenizer.encode(TEXT)
    expected = [prompt[number % len(prompt)] for number in range(60)]
    chunks: list[OutputChunk] = []
    server.loop.pause_tokens = TOKENS_PER_STEP
    async for chunk in client.generate(TEXT, job_id="mine", max_new_tokens=60, stop=["never there"]):
        chunks.append(chunk)
        if len(tokens_of(chunks)) % 4:
            disturb(server)
        server.loop.pause_tokens += TOKENS_PER_STEP
    assert tokens_of(chunks) == expected
    assert text_of(chunks) == server.model.tokenizer.decode(expected, skip_special_tokens=True)
    assert len(server.loop.submitted) > 2
    for sequence in server.loop.submitted:
        assert list(sequence.spec.output) == expected[: len(sequence.spec.output)]
    ids = [sequence.id for sequence in server.loop.submitted]
    assert ids == sorted(set(ids)), "ids only grow"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens, usage.num_verify_steps) == (60, len(prompt), 20)


async def test_all_that_is_unfinished_is_submitted_again_in_its_order(
    server: GenerationServer, client: AsyncClient
) -> None:
    server.loop.slots = 2
    server.loop.pause_tokens = TOKENS_PER_STEP
    names = [f"job-{number}" for number in range(5)]
    for name in names:
        await client.create_job([5, 6], job_id=name, max_new_tokens=9, logprobs=True, top_logprobs=2)
    await until(lambda: server.link.num_waiting == 3 and len(server.loop.submitted) == 5)
    server.loop.break_streams()
    await until(lambda: len(server.loop.submitted) == 10)
    assert [sequence.spec.job_id for sequence in server.loop.submitted[5:]] == names
    assert server.link.num_waiting == 3
    server.loop.pause_tokens = None
    for name in names:
        chunks = await collect(client.watch_job(name))
        assert tokens_of(chunks) == [5, 6] * 4 + [5]
        assert logprobs_in(chunks) == [logprobs_of(t, 2) for t in tokens_of(chunks)]


async def test_a_sequence_that_cannot_be_submitted_fails_and_no_other(
    server: GenerationServer, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_pb = SequenceSpec.to_pb

    def fail_one(spec: SequenceSpec, sequence_id: int, epoch: int) -> Any:
        if epoch and spec.job_id == "bad":
            raise ValueError("Value out of range: -1")
        return to_pb(spec, sequence_id, epoch)

    monkeypatch.setattr(SequenceSpec, "to_pb", fail_one)
    requests = (client.generate([5], job_id=name, max_new_tokens=3) for name in ("before", "bad", "after"))
    before, bad, after = await asyncio.gather(*map(collect, requests), return_exceptions=True)
    assert isinstance(bad, InternalError)
    assert [tokens_of(chunks) for chunks in (before, after)] == [[5] * 3] * 2  # type: ignore[arg-type]
    assert server.manager.num_jobs == 0


async def test_a_cancel_needs_no_scheduler(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    watched = client.generate([5, 6], job_id="called", max_new_tokens=9)
    await anext(watched)
    left = client.generate([5, 6], job_id="left", max_new_tokens=9)
    await anext(left)
    server.loop.pause()
    await until(lambda: not server.link.running)
    await client.cancel_job("called")
    assert [chunk.finish_reason for chunk in await collect(watched)] == ["abort"]
    await left.aclose()
    assert (await state_of(client, "left", JobState.ENDED)).finish_reason == "abort"
    server.loop.serve()
    await until(lambda: server.loop.description is not None)
    assert tokens_of(await collect(client.generate([7], max_new_tokens=3))) == [7] * 3
    assert len(server.loop.submitted) == 3


async def test_a_cancel_that_the_scheduler_did_not_live_to_see(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([5], job_id="mine", max_new_tokens=9)
    await state_of(client, "mine", JobState.RUNNING)
    server.link.cancel(next(iter(server.link.running.values())))
    server.loop.break_streams()
    assert (await state_of(client, "mine", JobState.ENDED)).finish_reason == "abort"


async def test_requests_come_in_while_there_is_no_scheduler() -> None:
    async with generation_server(capacity=2) as server, AsyncClient(server.address) as client:
        server.loop.pause("verify is gone")
        await until(lambda: not server.loop.description)
        streams = [asyncio.ensure_future(collect(client.generate([5], max_new_tokens=6))) for _ in range(2)]
        await until(lambda: server.link.num_waiting == 2)
        with pytest.raises(ResourceExhaustedError, match="the queue is full"):
            await client.create_job([5])
        # The last known state.
        assert (await client.server_info()).model == STATE.model
        server.loop.serve()
        assert [tokens_of(chunks) for chunks in await asyncio.gather(*streams)] == [[5] * 6] * 2


async def test_no_scheduler_for_too_long() -> None:
    async with generation_server(outage_timeout_s=0.3) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        chunks = client.generate([5], job_id="mine", max_new_tokens=9, reconnect_s=0)
        await anext(chunks)
        server.loop.pause("verify is gone")
        with pytest.raises(UnavailableError, match=r"verify is gone, for 0\.3 s") as caught:
            await anext(chunks)
        assert caught.value.retry_after_ms is not None
        assert server.metric("requests_total", outcome="error") == 1
        # The same request again goes on from the output kept.
        server.loop.pause_tokens = None
        server.loop.serve()
        await until(lambda: server.link._absence is None)
        again = await collect(client.generate([5], job_id="mine", max_new_tokens=9))
        assert tokens_of(again) == [5] * 9
        assert len(server.loop.submitted[-1].spec.output) == TOKENS_PER_STEP


async def test_another_model_continues_no_output(client: AsyncClient) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        chunks = client.generate([5], job_id="mine", max_new_tokens=9)
        first = await anext(chunks)
        server.loop.serve(model="other")
        with pytest.raises(UnavailableError, match="the model changed") as caught:
            await anext(chunks)
        assert caught.value.retry_after_ms is None
        server.model = server.link.model()
        server.loop.pause_tokens = None
        again = await collect(client.generate([5], job_id="mine", max_new_tokens=9))
        assert tokens_of(again) == [5] * 9
        assert again[0].attempt > first.attempt
        assert server.loop.submitted[-1].spec.output == ()


async def test_a_failure_that_a_retry_cannot_fix(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    chunks = client.generate([5], max_new_tokens=9)
    await anext(chunks)
    server.loop.pause("draft and verify differ", is_final=True)
    with pytest.raises(FailedPreconditionError, match="cannot serve: draft and verify differ"):
        await anext(chunks)
    with pytest.raises(FailedPreconditionError, match="cannot serve: draft and verify differ"):
        server.link.model()
    server.loop.serve()
    await until(lambda: server.link.num_running == 0)


async def test_a_stop_string_found_while_the_scheduler_dies(server: GenerationServer, client: AsyncClient) -> None:
    ids = server.model.tokenizer.encode("abcdef")
    server.loop.pause_tokens = TOKENS_PER_STEP
    server.loop.cancelled = _BreaksTheStream(server)
    chunks = await collect(client.generate(ids, stop="b", max_new_tokens=100))
    assert (text_of(chunks), chunks[-1].finish_reason) == ("a", "stop")


class _BreaksTheStream(list[object]):
    """Breaks the stream instead of taking note of a cancel."""

    def __init__(self, server: GenerationServer) -> None:
        super().__init__()
        self._server = server

    def append(self, _: object) -> None:
        """See the class."""
        for stream in self._server.loop._streams:
            stream.aborted.clear()
        self._server.loop.break_streams()


async def test_sequences_that_are_too_long_for_one_message_go_in_several() -> None:
    context_tokens = MAX_TOKENS_PER_MESSAGE
    async with generation_server(context_tokens=context_tokens) as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        prompt = [300] * (context_tokens // 2)
        for number in range(5):
            await client.create_job(prompt, job_id=f"job-{number}", max_new_tokens=TOKENS_PER_STEP)
        server.loop.break_streams()
        await until(lambda: len(server.loop.running) == 5)
        server.loop.may_step.set()
        for number in range(5):
            assert tokens_of(await collect(client.watch_job(f"job-{number}"))) == [300] * TOKENS_PER_STEP


async def test_watchers_and_samples_see_no_break(server: GenerationServer, client: AsyncClient) -> None:
    server.loop.pause_tokens = TOKENS_PER_STEP
    await client.create_job([5, 6], job_id="mine", n=3, max_new_tokens=CONTEXT_TOKENS - 2)
    watchers = [asyncio.ensure_future(collect(client.watch_job("mine"))) for _ in range(3)]
    server.loop.pause_tokens = None
    for _ in range(5):
        server.loop.break_streams()
        num_streams = server.loop.num_streams
        await until(lambda before=num_streams: server.loop.num_streams > before)  # type: ignore[misc]
    for chunks in await asyncio.gather(*watchers):
        for index in range(3):
            sample = [chunk for chunk in chunks if chunk.sample_index == index]
            assert tokens_of(sample) == [5, 6] * (CONTEXT_TOKENS // 2 - 1)
    async with aclosing(client.watch_job("mine")) as again:
        assert (await anext(again)).token_offset == 0


async def test_a_drawn_seed_belongs_to_the_job_whatever_dies() -> None:
    async with generation_server(outage_timeout_s=0.2) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        created = await client.create_job(TEXT, job_id="mine", max_new_tokens=30, temperature=1.0)
        async with aclosing(client.watch_job("mine")) as chunks:
            begun = await anext(chunks)
        server.loop.pause("the draft is gone")
        async with asyncio.timeout(30):
            while not (await client.get_job("mine")).error:
                pass
        server.loop.serve()
        await until(lambda: server.link._absence is None)
        server.loop.pause_tokens = None
        again = await client.create_job(TEXT, job_id="mine", max_new_tokens=30, temperature=1.0)
        rest = await collect(client.watch_job("mine", from_token=len(begun.token_ids)))
        prompt = server.model.tokenizer.encode(TEXT)
        assert tokens_of([begun, *rest]) == [prompt[number % len(prompt)] for number in range(30)]
        assert again.attempt == created.attempt == begun.attempt == rest[-1].attempt
        first, *others = server.loop.submitted
        assert others
        for sequence in others:
            assert sequence.spec.sampling.seed == first.spec.sampling.seed
        assert rest[-1].usage is not None
        assert rest[-1].usage.seed == first.spec.sampling.seed


async def test_many_sequences_are_submitted_again_a_message_at_a_time_and_all_fail_when_it_takes_too_long() -> None:
    num_jobs = 2 * MAX_SEQUENCES_PER_MESSAGE + 1
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = 0
        await asyncio.gather(*(client.create_job([5], job_id=f"job-{n}") for n in range(num_jobs)))
        await until(lambda: len(server.loop.submitted) == num_jobs)
        server.loop.break_streams()
        await until(lambda: len(server.loop.submitted) == 2 * num_jobs)
        again = [sequence.spec.job_id for sequence in server.loop.submitted[num_jobs:]]
        assert again == [sequence.spec.job_id for sequence in server.loop.submitted[:num_jobs]]
        server.loop.pause("verify is gone")
        await until(lambda: not server.link.running)
        end_outage(server)
        await until(lambda: server.metric("requests_total", outcome="error") == num_jobs)
        assert server.link.num_waiting == server.link.num_running == 0


async def test_a_sequence_that_ends_every_epoch_fails_and_others_go_on(
    server: GenerationServer, client: AsyncClient
) -> None:
    server.loop.stuck.add("poison")
    server.loop.pause_tokens = 0
    poison = asyncio.ensure_future(collect(client.generate([5], job_id="poison", max_new_tokens=60)))
    other = client.generate([6], job_id="other", max_new_tokens=60)
    for number, disturb in enumerate((break_stream, pause_for_a_while, attach_again), start=1):
        server.loop.pause_tokens = number * TOKENS_PER_STEP
        assert tokens_of([await anext(other)]) == [6] * TOKENS_PER_STEP
        await until(lambda: [one.is_in_slot for one in server.link.running.values()] == [True, True])
        assert server.metric("sequences_given_up_total") == 0
        disturb(server)
        await until(lambda count=2 * number: len(server.loop.submitted) > count)
    with pytest.raises(InternalError, match=r"^3 times in a row all work was lost while this sequence ran"):
        await poison
    assert server.metric("sequences_given_up_total") == 1
    server.loop.pause_tokens = None
    assert len(tokens_of(await collect(other))) == 60 - 3 * TOKENS_PER_STEP


def test_tokens_make_up_for_lost_epochs() -> None:
    sample = sample_of()
    for num_tokens, is_in_slot, expected in ((0, True, 1), (0, True, 2), (4, True, 1), (4, False, 1), (4, True, 2)):
        sample.token_ids.extend([5] * (num_tokens - sample.num_tokens))
        sample.is_in_slot = is_in_slot
        sample.lose_epoch()
        assert (sample.num_lost_epochs, sample.is_in_slot) == (expected, False)


async def test_errors_that_are_kept_hold_no_frames_of_the_calls_that_they_end() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = TOKENS_PER_STEP
        await client.create_job(TEXT, job_id="mine", max_new_tokens=60)
        server.loop.pause("the model does not fit", is_final=True)
        await until(lambda: server.store.get("", "mine").error is not None)
        server.link.shut(ResourceExhaustedError("no more", retry_after_ms=7))
        for _ in range(3):
            with pytest.raises(FailedPreconditionError, match="does not fit"):
                await collect(client.watch_job("mine"))
            with pytest.raises(FailedPreconditionError, match="does not fit"):
                server.link.model()
            with pytest.raises(ResourceExhaustedError, match="no more") as caught:
                server.link.check_room()
            assert caught.value.retry_after_ms == 7
        kept = (server.store.get("", "mine").error, server.link._absence, server.link._shut)
        assert [error.__traceback__ for error in kept] == [None, None, None]


async def test_a_request_that_comes_back_while_it_is_cancelled_counts_once(
    server: GenerationServer, client: AsyncClient
) -> None:
    """Its sequence before and its new one are both at the scheduler, and have their counts and times together."""
    server.loop.slots = 0
    chunks = asyncio.ensure_future(collect(client.generate([5], job_id="mine", max_new_tokens=6)))
    await until(lambda: len(server.loop.submitted) == 1)
    job = server.store.get("", "mine")
    assert job is not None
    server.loop.slots = 64
    # In one turn of the event loop, so that one message cancels the one and submits the other.
    server.manager.leave(job, None)
    server.manager.go_on(job, server.model)
    assert tokens_of(await chunks) == [5] * 6
    await until(lambda: not server.link.samples)
    assert server.link.num_waiting == 0


async def test_a_sequence_whose_end_is_being_written_is_not_submitted_again(tmp_path: Path) -> None:
    """A scheduler would run it up to its length, with nobody to end it."""
    async with (
        generation_server(journal=tmp_path / "journal") as server,
        AsyncClient(server.address) as client,
    ):
        server.loop.pause_tokens = 0
        await client.create_job([5], job_id="late", max_new_tokens=9)
        await until(lambda: len(server.loop.submitted) == 1)
        server.loop.pause("verify is gone")
        await until(lambda: not server.link.running)
        journal, may_write = server.manager.journal, threading.Event()
        assert journal._file is not None
        commit = journal._file.commit
        journal._file.commit = lambda changes, rows: commit(changes, rows) if may_write.wait(30) else 0  # type: ignore[method-assign]
        job = server.store.get("", "late")
        assert job is not None
        journal.accept(job)
        # The end of the outage's time waits for the disk.
        end_outage(server)
        await until(lambda: any(item.then is not None for item in journal._pending))
        server.loop.serve()
        await until(lambda: server.link._absence is None)
        may_write.set()
        await until(lambda: server.metric("requests_total", outcome="error") == 1)
        server.loop.pause_tokens = None
        await collect(client.generate([6], job_id="other", max_new_tokens=3))
        assert [sequence.spec.job_id for sequence in server.loop.submitted] == ["late", "other"]


async def test_a_client_learns_when_to_come_back_to_a_full_scheduler(
    server: GenerationServer, client: AsyncClient
) -> None:
    server.loop.error = ResourceExhaustedError("the scheduler is full", retry_after_ms=700)
    with pytest.raises(ResourceExhaustedError, match="the scheduler is full") as caught:
        await collect(client.generate([5], max_new_tokens=9))
    assert caught.value.retry_after_ms == 700


FEW = pb.TokenIds(ids=[5, 6, 7])


def calls_of(channel: grpc.Channel, *, has_jobs: bool) -> Iterator[tuple[str, Any]]:
    """Every call that needs a scheduler, or the jobs that come back with it."""
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    resume = pb.Resume(from_tokens=[3], attempt=17)
    yield "Generate", lambda: list(stub.Generate(pb.GenerateRequest(input_ids=FEW)))
    yield "Generate of a text", lambda: list(stub.Generate(pb.GenerateRequest(text="a" * 5000)))
    yield "Generate again", lambda: list(stub.Generate(pb.GenerateRequest(job_id="a", input_ids=FEW, resume=resume)))
    yield "CreateJob", lambda: stub.CreateJob(pb.CreateJobRequest(job_id="a", input_ids=FEW))
    yield "GetServerInfo", lambda: stub.GetServerInfo(pb.GetServerInfoRequest())
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=[5])
    yield "vLLM's Generate", lambda: list(engine.Generate(vllm_engine_pb2.GenerateRequest(tokenized=tokenized)))
    yield "vLLM's GetModelInfo", lambda: engine.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    yield "vLLM's HealthCheck", lambda: engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    if has_jobs:
        # Without a journal these jobs are lost, and that is the answer.
        yield "WatchJob", lambda: list(stub.WatchJob(pb.WatchJobRequest(job_id="a", from_token=3)))
        yield "GetJob", lambda: stub.GetJob(pb.GetJobRequest(job_id="a"))
        yield "ListJobs", lambda: stub.ListJobs(pb.ListJobsRequest())
        yield "CancelJob", lambda: stub.CancelJob(pb.CancelJobRequest(job_id="a"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_jobs", [True, False])
def test_every_call_is_unavailable_with_the_time_to_come_back(tmp_path: Path, has_jobs: bool) -> None:
    tmp_path.chmod(0o700)
    journal = ("--state-dir", str(tmp_path)) if has_jobs else ()
    with gateway_processes(tmp_path, 1, *journal) as gateways:
        with Client(gateways.addresses[0]) as client:
            gateways.scheduler.pause_tokens = 3
            client.create_job([5, 6, 7], job_id="a", max_new_tokens=9)
        gateways.kill(0)
        gateways.scheduler.pause()
        gateways.start(0)
        with grpc.insecure_channel(gateways.addresses[0]) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            for name, call in calls_of(channel, has_jobs=has_jobs):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                error = error_from_rpc(refused.value)
                assert type(error) is UnavailableError, (name, error)
                assert error.retry_after_ms, name
        gateways.scheduler.pause_tokens = None
        gateways.scheduler.serve(replace(DESCRIPTION, tokenizer_path=str(target_dir())))
        with Client(gateways.addresses[0]) as client:
            text = list(client.generate([5, 6, 7], job_id="a", max_new_tokens=9))
            assert [token for chunk in text for token in chunk.token_ids] == [5, 6, 7] * 3


PROMPT = [5, 6, 7, 8, 9]
NUM_JOBS = 4
NUM_TOKENS = 120


@asynccontextmanager
async def behind_a_proxy(folder: Path) -> AsyncIterator[tuple[ScriptedScheduler, BreakingProxy, AsyncClient]]:
    """A gateway's process with its way to the scheduler, and its client."""
    scheduler = ScriptedScheduler(replace(DESCRIPTION, tokenizer_path=str(target_dir())))
    with ExitStack() as held:
        behind = held.enter_context(serving(scheduler, folder))
        async with breaking_proxy(behind, folder / "proxy.sock") as (way, proxy):
            gateways = GatewayProcesses(folder, scheduler, way, [f"unix:{folder}/clients.sock"])
            with closing(gateways):
                gateways.start(0)
                await gateways.serve(0)
                async with AsyncClient(gateways.addresses[0]) as client:
                    yield scheduler, proxy, client


def start(client: AsyncClient) -> list[asyncio.Task[list[OutputChunk]]]:
    """Starts the jobs."""
    return [
        asyncio.create_task(collect(client.generate(PROMPT, job_id=f"job-{number}", max_new_tokens=NUM_TOKENS)))
        for number in range(NUM_JOBS)
    ]


async def check(outputs: list[asyncio.Task[list[OutputChunk]]]) -> None:
    """Every job has its tokens, each once."""
    for chunks in await asyncio.gather(*outputs):
        assert tokens_of(chunks) == (PROMPT * NUM_TOKENS)[:NUM_TOKENS]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS


@pytest.mark.timeout(120)
async def test_a_connection_that_is_reset_again_and_again(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with behind_a_proxy(tmp_path) as (scheduler, proxy, client):
        scheduler.pause_tokens = TOKENS_PER_STEP
        outputs = start(client)
        for _ in range(8):
            await until(lambda: len(scheduler.running) == NUM_JOBS)
            scheduler.pause_tokens += TOKENS_PER_STEP * rng.randrange(1, 4)
            # In the middle of what is sent, or after it.
            await asyncio.sleep(rng.random() * 0.02)
            before = scheduler.num_streams
            proxy.cut()
            await until(lambda before=before: scheduler.num_streams > before)  # type: ignore[misc]
        scheduler.pause_tokens = None
        await check(outputs)
        assert proxy.num_connections > 8


@pytest.mark.timeout(120)
async def test_a_slow_connection(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path) as (scheduler, proxy, client):
        proxy.delay_s = 0.05
        scheduler.pause_tokens = 10 * TOKENS_PER_STEP
        outputs = start(client)
        await until(lambda: len(scheduler.running) == NUM_JOBS)
        scheduler.pause_tokens = None
        proxy.cut()
        await check(outputs)


@pytest.mark.timeout(120)
async def test_a_connection_that_stands_still_is_given_up(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path) as (scheduler, proxy, client):
        scheduler.pause_tokens = 10 * TOKENS_PER_STEP
        outputs = start(client)
        await until(lambda: len(scheduler.running) == NUM_JOBS)
        proxy.loses_everything = True
        scheduler.pause_tokens = None
        # Only pings find out. What the scheduler has sent meanwhile is lost.
        before = proxy.num_connections
        await until(lambda: proxy.num_connections > before)
        assert not any(output.done() for output in outputs)
        proxy.loses_everything = False
        proxy.cut()
        await check(outputs)
