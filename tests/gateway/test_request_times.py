"""The times of requests until their first token, as the gateway keeps and serves them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from slipstream.client import AsyncClient
from slipstream.common.wire.recorder import Record, Site
from slipstream.common.wire.trace import HostRecords
from slipstream.gateway.keys import KeyFile, KeyInterceptor
from slipstream.gateway.metrics import RequestTimes, TimesOfRequests
from slipstream.protos import trace_pb2, trace_pb2_grpc
from tests.harness.generation_server import collect, generation_server
from tests.harness.waiting import TIMEOUT_S, until

if TYPE_CHECKING:
    from pathlib import Path

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
PHASES = [Site.TOKENISE, Site.SUBMIT, Site.FIRST_TOKEN]


async def read(address: str, key: str | None = None, **request: int) -> tuple[Record, ...]:
    """Calls `ReadRecords`."""
    metadata = [("authorization", f"Bearer {key}")] if key else None
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = trace_pb2_grpc.RecorderStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.ReadRecords(trace_pb2.ReadRecordsRequest(**request), metadata=metadata)
    return HostRecords.from_pb(answer).records


def test_the_oldest_request_goes() -> None:
    times = TimesOfRequests(capacity=2)
    for number in (5, 6, 6, 7):
        times.add(number, "", RequestTimes(100, 200))
    assert list(times.records("")) == [Record(Site.TOKENISE, number, 100, 200) for number in (6, 7)]


async def test_the_phases_of_a_request_follow_each_other() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        server.loop.may_step.clear()
        begin_ns = time.monotonic_ns()
        chunks = client.generate([5, 6, 7], job_id="job", max_new_tokens=300)
        first = asyncio.ensure_future(anext(chunks))
        await until(lambda: len(server.loop.running) == 1)
        before_step_ns = time.monotonic_ns()
        waiting = await read(server.address)
        server.loop.may_step.set()
        await first
        async with asyncio.timeout(TIMEOUT_S):
            while len(early := await read(server.address)) < len(PHASES):
                pass
        sent_ns = time.monotonic_ns()
        assert len(await collect(chunks)) > 1
        done = await read(server.address)
        assert await read(server.address, from_step=done[0].step + 1) == ()
    assert [record.site for record in waiting] == PHASES[:2]
    assert [record.site for record in done] == PHASES
    assert done[:2] == waiting
    assert begin_ns <= done[0].begin_ns <= done[0].end_ns == done[1].begin_ns <= done[1].end_ns == done[2].begin_ns
    assert done[1].end_ns <= before_step_ns <= done[2].end_ns <= sent_ns
    # The messages after the first one are not noted.
    assert done == early


async def test_a_key_sees_its_own_requests(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"ann:{ANN}\nbob:{BOB}\n")
    (tmp_path / "keys").chmod(0o600)
    async with generation_server(interceptors=(KeyInterceptor(KeyFile(tmp_path / "keys")),)) as server:
        async with AsyncClient(server.address, api_key=ANN) as client:
            await collect(client.generate([5, 6, 7], max_new_tokens=4))
        assert [record.site for record in await read(server.address, ANN)] == PHASES
        assert await read(server.address, BOB) == ()
        with pytest.raises(grpc.aio.AioRpcError, match="authorization: Bearer TOKEN"):
            await read(server.address)
