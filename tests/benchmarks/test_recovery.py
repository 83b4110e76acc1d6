"""The gateway and the scheduler die under streaming clients, which get the same tokens and no error."""

from __future__ import annotations

import pytest

from slipstream.benchmarks.recovery import SERVICES, run


@pytest.mark.timeout(120)
async def test_clients_see_no_error_and_no_other_token() -> None:
    report = await run("cpu", seed=1, num_clients=4, num_kills=1)
    assert not report.problems, report.problems
    assert {service: len(times) for service, times in report.recovered_s.items()} == dict.fromkeys(SERVICES, 1)
    assert report.num_outputs
