"""A gateway's settings, and which of several gateways keeps a job."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.errors import ConfigError
from slipstream.gateway.config import GatewayConfig, Shard, shard_of


def test_a_shard_is_the_same_in_every_process() -> None:
    ids = [f"job-{number}" for number in range(100)]
    program = (
        "import sys; from slipstream.gateway.config import shard_of; print([shard_of(i, 7) for i in sys.argv[1:]])"
    )
    other = subprocess.run((sys.executable, "-c", program, *ids), capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([shard_of(job_id, 7) for job_id in ids])
    assert {shard_of(job_id, 1) for job_id in ids} == {0}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_gateway_draws_names_that_are_at_home_there(count: int) -> None:
    for index in range(count):
        drawn = [Shard(index, count).new_job_id() for _ in range(20)]
        assert {shard_of(job_id, count) for job_id in drawn} == {index}
        assert len(set(drawn)) == 20


def test_jobs_are_spread_evenly() -> None:
    num_jobs = Counter(shard_of(f"job-{number}", 4) for number in range(4000))
    assert all(800 < number < 1200 for number in num_jobs.values())


def test_no_two_jobs_have_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_700_000_000_000_000_000
    monkeypatch.setattr("time.time_ns", lambda: now_ns)
    given: list[int] = []
    for index in range(3):
        given += itertools.islice(Shard(index, 3).numbers_after(0), 50)
        assert given[-50:] == sorted(given[-50:])
    assert len(set(given)) == len(given)
    # A clock that is set back makes no number smaller.
    now_ns -= 10**12
    assert next(Shard(1, 3).numbers_after(max(given))) > max(given)


def config(**settings: Any) -> GatewayConfig:
    """One of a scheduler at some address."""
    return GatewayConfig(scheduler="unix:/run/scheduler.sock", **settings)


def test_each_gateway_has_its_part_of_the_queue() -> None:
    parts = [
        config(gateways=3, gateway_index=index, queue=11, private_listen=f"unix:/run/gateway-{index}.sock").own_queue
        for index in range(3)
    ]
    assert parts == [4, 4, 3]
    assert config(queue=11).own_queue == 11


@pytest.mark.parametrize("there", ["journal.sqlite3", "journal-1-of-3.sqlite3"])
def test_journals_of_another_number_of_gateways_are_refused(tmp_path: Path, there: str) -> None:
    two: dict[str, Any] = {"gateways": 2, "private_listen": "unix:/run/gateway-0.sock", "state_dir": tmp_path}
    path = config(**two).journal_path
    assert path == tmp_path / "journal-0-of-2.sqlite3"
    path.touch()
    (tmp_path / "journal-1-of-2.sqlite3").touch()
    config(**two)
    (tmp_path / there).touch()
    with pytest.raises(ConfigError, match=there) as caught:
        config(**two)
    assert caught.value.field == "gateways"
    assert f"accepted: {1 if there == 'journal.sqlite3' else 3}," in str(caught.value)
    config(**two, journal="off")


def test_gateways_find_each_other_beside_their_own_address() -> None:
    found = config(gateways=2, gateway_index=1, private_listen="unix:/run/x/gateway-1.sock").private_addresses
    assert found == ("unix:/run/x/gateway-0.sock", "unix:/run/x/gateway-1.sock")
    assert config(private_listen="unix:/run/x/any.sock").private_addresses == ()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"gateways": 0}, "gateways"),
        ({"gateways": 65}, "gateways"),
        ({"gateways": 2}, "private_listen"),
        ({"gateways": 2, "private_listen": "unix:/run/gateway-1.sock"}, "private_listen"),
        ({"gateways": 2, "private_listen": "unix:/run/other.sock"}, "private_listen"),
        ({"gateway_index": 1}, "gateway_index"),
        ({"gateways": 2, "private_listen": "unix:/run/gateway-0.sock", "queue": 1}, "queue"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert caught.value.field == field
