"""Each of the four services is killed under streaming clients: once here, 20 times by the benchmark."""

from __future__ import annotations

import pytest

from slipstream.benchmarks.outages import SERVICES, Plan, measure


@pytest.mark.timeout(180)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("service", SERVICES)
async def test_clients_do_not_notice_kills(service: str) -> None:
    recoveries, streams = await measure(Plan(kills=1, clients=4, max_new_tokens=200, services=(service,)))
    assert [error for stream in streams for error in stream.errors] == []
    assert all(stream.num_jobs for stream in streams)
    assert [(row.service, row.kills) for row in recoveries] == [(service, 1)]
