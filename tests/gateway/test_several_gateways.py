"""Several gateways of one server: a job is found, watched and cancelled by any of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from slipstream.cli.trace import fetch_requests
from slipstream.client import AsyncClient
from slipstream.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.wire.events import Site
from slipstream.common.wire.job import FinishReason, JobState
from slipstream.gateway.keys import client_of, current_owner
from slipstream.gateway.peers import CLIENT_KEY, OWNER_KEY, FromPeers
from slipstream.protos import generation_pb2, generation_pb2_grpc
from tests.harness.gateway_processes import GatewayProcesses, gateway_processes
from tests.harness.generation_server import collect, state_of, tokens_of
from tests.harness.grpc_server import bytes_service, running_server
from tests.harness.waiting import DEADLINES_S, until

PROMPT = [5, 6, 7, 8, 9]
NUM_GATEWAYS = 3
EVERYWHERE = range(NUM_GATEWAYS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's state directory."""
    return tmp_path_factory.mktemp("gateways")


@pytest.fixture(scope="module")
def running(directory: Path) -> Iterator[GatewayProcesses]:
    """Three gateways."""
    with gateway_processes(directory, NUM_GATEWAYS) as processes:
        yield processes


@pytest.fixture
def gateways(running: GatewayProcesses) -> Iterator[GatewayProcesses]:
    """Three gateways, and a scheduler that steps when the test is over."""
    yield running
    running.scheduler.pause_tokens = None


@pytest.fixture
async def clients(gateways: GatewayProcesses) -> AsyncIterator[list[AsyncClient]]:
    """A client of each gateway."""
    clients = [AsyncClient(address) for address in gateways.addresses]
    yield clients
    await asyncio.gather(*(client.close() for client in clients))


def expected(num_tokens: int) -> list[int]:
    """The tokens of PROMPT, as the scripted scheduler makes them."""
    return [PROMPT[number % len(PROMPT)] for number in range(num_tokens)]


async def cancelled(gateways: GatewayProcesses, job_id: str) -> None:
    """Returns when the scheduler was told to end the job's sequence."""
    await until(lambda: job_id in {sequence.spec.job_id for sequence in gateways.scheduler.cancelled})


async def test_a_job_is_found_and_watched_through_any_gateway(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    for home in EVERYWHERE:
        job_id = gateways.job_of(home, "found")
        created = await clients[0].create_job(PROMPT, job_id=job_id, max_new_tokens=20)
        for client in clients:
            assert tokens_of(await collect(client.watch_job(job_id))) == expected(20)
            assert tokens_of(await collect(client.watch_job(job_id, 7, attempt=created.attempt))) == expected(20)[7:]
            found = await client.get_job(job_id)
            assert (found.state, found.attempt, found.num_tokens) == (JobState.ENDED, created.attempt, 20)


async def test_generate_ends_alike_through_any_gateway(gateways: GatewayProcesses, clients: list[AsyncClient]) -> None:
    job_id = gateways.job_of(1, "alike")
    through_each = [await collect(client.generate(PROMPT, job_id=job_id, max_new_tokens=9)) for client in clients]
    assert [tokens_of(chunks) for chunks in through_each] == [expected(9)] * 3
    assert len({chunks[-1].job_usage for chunks in through_each}) == 1


async def test_a_server_draws_names_of_jobs_that_stay(gateways: GatewayProcesses) -> None:
    for index, address in enumerate(gateways.addresses):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            for _ in range(5):
                request = generation_pb2.CreateJobRequest(input_ids=generation_pb2.TokenIds(ids=PROMPT))
                assert gateways.home_of((await stub.CreateJob(request)).job.job_id) == index


async def test_each_gateway_returns_the_times_of_its_own_requests(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    for home in EVERYWHERE:
        await collect(clients[0].generate(PROMPT, job_id=gateways.job_of(home, "timed"), max_new_tokens=9))
    services = (await clients[0].server_info()).services[:NUM_GATEWAYS]
    found = await fetch_requests(gateways.addresses[0], services, {})
    assert [process.pid for process in found] == [gateways.pid(index) for index in EVERYWHERE]
    for index, process in enumerate(found):
        assert {record.step % NUM_GATEWAYS for record in process.records} == {index}
        assert Site.FIRST_TOKEN in {record.site for record in process.records}


async def test_a_job_is_cancelled_through_another_gateway(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    gateways.scheduler.pause_tokens = 3
    job_id = gateways.job_of(2, "cancelled")
    await clients[1].create_job(PROMPT, job_id=job_id, max_new_tokens=50)
    await state_of(clients[0], job_id, JobState.RUNNING)
    await clients[0].cancel_job(job_id)
    chunks = await collect(clients[1].watch_job(job_id))
    assert chunks[-1].finish_reason is FinishReason.ABORT


async def test_the_same_request_through_two_gateways_is_one_job(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    for number in range(10):
        job_id = f"same-{number}"
        both = await asyncio.gather(
            *(collect(client.generate(PROMPT, job_id=job_id, max_new_tokens=12)) for client in clients)
        )
        assert [tokens_of(chunks) for chunks in both] == [expected(12)] * 3
        assert len({chunk.attempt for chunks in both for chunk in chunks}) == 1
        assert [one.spec.job_id for one in gateways.scheduler.submitted].count(job_id) == 1


async def test_errors_come_through_whole(gateways: GatewayProcesses, clients: list[AsyncClient]) -> None:
    job_id = gateways.job_of(1, "errors")
    for client in clients:
        with pytest.raises(NotFoundError, match=job_id):
            await client.get_job(job_id)
        with pytest.raises(InvalidArgumentError) as caught:
            await collect(client.generate(PROMPT, job_id=job_id, max_new_tokens=0))
        assert caught.value.field == "sampling_params.max_new_tokens"
    await clients[1].create_job(PROMPT, job_id=job_id, max_new_tokens=3)
    for client in clients:
        with pytest.raises(AlreadyExistsError):
            await client.create_job(PROMPT, job_id=job_id, max_new_tokens=4)


async def test_lists_have_the_jobs_of_all_gateways_the_latest_first(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    names = [f"listed-{number}" for number in range(12)]
    for number, name in enumerate(names):
        await clients[number % 3].create_job(PROMPT, job_id=name, max_new_tokens=3)
    assert {gateways.home_of(name) for name in names} == set(EVERYWHERE)
    for client in clients:
        page = await client.list_jobs(page_size=12)
        assert [job.job_id for job in page.jobs] == names[::-1]
        assert list(page.jobs) == sorted(page.jobs, key=lambda job: job.created_at, reverse=True)
        found, token = [], ""
        while len(found) < 12:
            page = await client.list_jobs(page_size=5, page_token=token)
            found += [job.job_id for job in page.jobs]
            # Jobs that come meanwhile move none.
            await client.create_job(PROMPT, max_new_tokens=3)
            token = page.next_page_token
        assert found[:12] == names[::-1]
        for name in names:
            await client.create_job(PROMPT, job_id=name, max_new_tokens=3)
        names = [job.job_id for job in (await client.list_jobs(page_size=12)).jobs][::-1]


async def test_every_page_ends(clients: list[AsyncClient]) -> None:
    everything = (await clients[0].list_jobs(page_size=1000)).jobs
    found, token = [], ""
    while True:
        page = await clients[1].list_jobs(page_size=7, page_token=token)
        found += [job.job_id for job in page.jobs]
        if not (token := page.next_page_token):
            break
    assert found == [job.job_id for job in everything]
    with pytest.raises(InvalidArgumentError, match="page_token"):
        await clients[1].list_jobs(page_token="x")


async def test_a_client_that_leaves_ends_its_job_elsewhere(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    gateways.scheduler.pause_tokens = 6
    job_id = gateways.job_of(0, "left")
    async with aclosing(clients[2].generate(PROMPT, job_id=job_id, max_new_tokens=60)) as chunks:
        async for chunk in chunks:
            assert chunk.token_ids
            break
    await cancelled(gateways, job_id)


async def test_a_deadline_ends_the_job_elsewhere(gateways: GatewayProcesses, clients: list[AsyncClient]) -> None:
    gateways.scheduler.pause_tokens = 6
    for timeout_s in DEADLINES_S:
        job_id = gateways.job_of(0, f"late-{timeout_s}")
        with pytest.raises(DeadlineExceededError):
            await collect(clients[2].generate(PROMPT, job_id=job_id, max_new_tokens=60, timeout_s=timeout_s))
        if job_id in {sequence.spec.job_id for sequence in gateways.scheduler.submitted}:
            break
    await cancelled(gateways, job_id)


async def test_requests_of_openai_clients_are_aborted_through_any_gateway(gateways: GatewayProcesses) -> None:
    gateways.scheduler.pause_tokens = 3
    ids = [gateways.job_of(index, "openai") for index in EVERYWHERE]
    async with (
        grpc.aio.insecure_channel(gateways.addresses[0]) as first,
        grpc.aio.insecure_channel(gateways.addresses[1]) as second,
    ):
        generating = [
            vllm_engine_pb2_grpc.VllmEngineStub(first).Generate(
                vllm_engine_pb2.GenerateRequest(
                    request_id=job_id, tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT), stream=True
                )
            )
            for job_id in ids
        ]
        for call in generating:
            assert await call.read() is not grpc.aio.EOF
        await vllm_engine_pb2_grpc.VllmEngineStub(second).Abort(vllm_engine_pb2.AbortRequest(request_ids=ids))
        for job_id, call in zip(ids, generating, strict=True):
            await cancelled(gateways, job_id)
            while (last := await call.read()) is not grpc.aio.EOF:
                message = last
            assert message.complete.finish_reason == "abort"


async def test_every_gateway_shows_all(gateways: GatewayProcesses, clients: list[AsyncClient]) -> None:
    for client in clients:
        state = await client.server_info()
        names = [service.name for service in state.services]
        assert names == ["gateway-0", "gateway-1", "gateway-2", "scheduler", "verify"]
        assert [service.address for service in state.services][:3] == gateways.private
        assert len({service.pid for service in state.services}) == 5
        assert len({service.metrics_port for service in state.services[:3]}) == 3
        assert state.queue_capacity == 256


async def test_a_gateway_dies_and_comes_back(gateways: GatewayProcesses, clients: list[AsyncClient]) -> None:
    gateways.scheduler.pause_tokens = 6
    lost, kept = gateways.job_of(1, "dies"), gateways.job_of(2, "lives")
    await clients[0].create_job(PROMPT, job_id=kept, max_new_tokens=15)
    following = clients[0].generate(PROMPT, job_id=lost, max_new_tokens=15, reconnect_s=0)
    await anext(following)
    gateways.kill(1)
    with pytest.raises(UnavailableError) as caught:
        await collect(following)
    assert caught.value.retry_after_ms
    with pytest.raises(UnavailableError, match="gateway-1") as caught:
        await clients[2].get_job(lost)
    assert caught.value.retry_after_ms
    with pytest.raises(UnavailableError, match="gateway-1"):
        await clients[2].list_jobs()
    ended = [gateways.job_of(index, "aborted") for index in (0, 2)]
    for job_id in ended:
        await clients[0].create_job(PROMPT, job_id=job_id, max_new_tokens=15)
    async with grpc.aio.insecure_channel(gateways.addresses[0]) as channel:
        request = vllm_engine_pb2.AbortRequest(request_ids=[lost, *ended])
        with pytest.raises(grpc.aio.AioRpcError, match="gateway-1"):
            await vllm_engine_pb2_grpc.VllmEngineStub(channel).Abort(request)
    for job_id in ended:
        await cancelled(gateways, job_id)
    assert [service.pid for service in (await clients[0].server_info()).services].count(0) == 1
    gateways.scheduler.pause_tokens = None
    assert tokens_of(await collect(clients[0].watch_job(kept))) == expected(15)
    # A client of the library waits for it.
    again = asyncio.create_task(collect(clients[0].generate(PROMPT, job_id=lost, max_new_tokens=15)))
    gateways.start(1)
    assert tokens_of(await again) == expected(15)
    await gateways.serve(1)
    assert (await clients[1].get_job(lost)).num_tokens == 15
    assert all(service.pid for service in (await clients[0].server_info()).services)


async def test_lists_are_unavailable_while_a_gateway_does_not_answer(
    gateways: GatewayProcesses, clients: list[AsyncClient]
) -> None:
    await clients[0].create_job(PROMPT, job_id="listed", max_new_tokens=3)
    os.kill(gateways.pid(1), signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, gateways.pid(1), os.WSTOPPED | os.WNOWAIT)
    try:
        with pytest.raises(UnavailableError, match="gateway-1") as caught:
            await clients[0].list_jobs()
    finally:
        os.kill(gateways.pid(1), signal.SIGCONT)
    assert caught.value.retry_after_ms
    assert "listed" in {job.job_id for job in (await clients[0].list_jobs()).jobs}


async def test_gateways_share_a_port_and_end_together(tmp_path: Path) -> None:
    """Ended while a client follows a job, through whatever gateway: it comes to its end."""

    def run() -> Iterator[GatewayProcesses]:
        with gateway_processes(tmp_path, 2, is_port_shared=True) as processes:
            yield processes

    starting = run()
    gateways = await asyncio.to_thread(next, starting)
    gateways.scheduler.pause_tokens = 3
    clients = [AsyncClient(gateways.addresses[0]) for _ in range(12)]
    followed = [
        client.generate(PROMPT, job_id=f"shared-{number}", max_new_tokens=9, reconnect_s=0)
        for number, client in enumerate(clients)
    ]
    outputs = [[await anext(chunks)] for chunks in followed]
    stopping = asyncio.create_task(asyncio.to_thread(gateways.stop))
    await until(lambda: _refuses(gateways.addresses[0]))
    gateways.scheduler.pause_tokens = None
    for output, chunks in zip(outputs, followed, strict=True):
        assert tokens_of([*output, *await collect(chunks)]) == expected(9)
    assert await stopping == [0, 0]
    await asyncio.gather(*(client.close() for client in clients))
    await asyncio.to_thread(next, starting, None)


def _refuses(address: str) -> bool:
    with suppress(SlipstreamError), grpc.insecure_channel(address) as channel:
        request = generation_pb2.CreateJobRequest(input_ids=generation_pb2.TokenIds(ids=PROMPT))
        try:
            generation_pb2_grpc.GenerationStub(channel).CreateJob(request, timeout=5)
        except grpc.RpcError:
            return True
    return False


async def _who(_request: bytes, context: Any) -> bytes:
    return f"{client_of(context)} {current_owner()}".encode()


async def test_a_private_address_believes_who_the_client_is(tmp_path: Path) -> None:
    service = bytes_service("Test", Who=grpc.unary_unary_rpc_method_handler(_who))
    metadata = ((CLIENT_KEY, "ipv4:1.2.3.4:5"), (OWNER_KEY, "ada"))
    address = f"unix:{tmp_path}/private/gateway-0.sock"
    async with (
        running_server(service, address=address, interceptors=[FromPeers()]) as private,
        running_server(service) as public,
        grpc.aio.insecure_channel(private.address) as to_private,
        grpc.aio.insecure_channel(public.address) as to_public,
    ):
        assert await to_private.unary_unary("/Test/Who")(b"", metadata=metadata) == b"ipv4:1.2.3.4:5 ada"
        assert (await to_private.unary_unary("/Test/Who")(b"")).startswith(b"unix:")
        assert b"1.2.3.4" not in await to_public.unary_unary("/Test/Who")(b"", metadata=metadata)
