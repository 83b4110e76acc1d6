"""All four services are killed under streaming clients: once each here, 20 times each by the benchmark."""

from __future__ import annotations

import pytest

from slipstream.benchmarks.outages import SERVICES, Plan, measure


@pytest.mark.timeout(180)
async def test_clients_do_not_notice_kills() -> None:
    recoveries, streams = await measure(Plan(kills=1, clients=4, max_new_tokens=200, services=SERVICES))
    assert [error for stream in streams for error in stream.errors] == []
    assert all(stream.num_jobs for stream in streams)
    assert {row.service: row.kills for row in recoveries} == dict.fromkeys(SERVICES, 1)
