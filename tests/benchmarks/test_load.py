"""`benchmarks/load.py`: the search, runs that do not count, files in pieces, and a small run of the real services."""

from __future__ import annotations

import json
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from slipstream.benchmarks import load
from slipstream.benchmarks.charts import draw_capacity, draw_load
from slipstream.benchmarks.load import InvalidRunError, Plan, Search, check, find_capacity, highest_rate, measure
from slipstream.benchmarks.load_generator import COMPLETED, FAILED, LEFT, LoadRun, RequestRecord
from slipstream.benchmarks.load_report import report_of
from slipstream.benchmarks.load_results import CapacityResult, DraftFaults, LoadResult, TriedRate, merged, throughput
from slipstream.benchmarks.models import EAGLE3, EAGLE3_AUTO, NONE
from slipstream.benchmarks.result_files import read_rows, write_rows
from slipstream.benchmarks.up_server import LOG_DIR_VARIABLE
from slipstream.common.rpc.scrape import Scrape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from slipstream.benchmarks.load_report import LoadReport
    from slipstream.benchmarks.load_workloads import LoadWorkload
    from slipstream.benchmarks.up_server import UpServer
    from slipstream.benchmarks.workload import Arrival

PATIENT = "--draft-timeout-ms 20000"
"""A busy machine may take a while; the tests are about drafts that are there, or killed."""


def completed() -> RequestRecord:
    """A request with two tokens."""
    record = RequestRecord(intended_s=0.0, sent_s=0.0, wanted_tokens=2, outcome=COMPLETED, ended_s=1.0)
    record.times_s.extend((0.25, 1.0))
    record.counts.extend((1, 1))
    return record


class FakeServer:
    """A server of nothing but metrics and a draft's process, either of which a test may change."""

    address = "unix:/nowhere"
    losses, pid = 0, 5

    async def metrics(self) -> Scrape:
        """The count of lost drafts."""
        return Scrape.read(f'slipstream_draft_losses_total{{cause="died"}} {self.losses}\n')

    async def until(self, *_: object) -> Scrape:
        """Returns the metrics, whatever is waited for."""
        return await self.metrics()

    def services(self) -> dict[str, int]:
        """The process of one service."""
        return {"draft": self.pid}


def result(**fields: Any) -> LoadResult:
    """The result of one request."""
    about = {"model": "bundled", "draft": NONE, "workload": "chat", "options": "", "num_processes": 1, "host": "here"}
    return LoadResult.of(report_of(LoadRun([completed()], 2.0, 0.5, 2.0), 0.0), **about | fields)


def tried(rate: float, *, is_held: bool) -> TriedRate:
    """A rate that was tried."""
    return TriedRate(rate=rate, tokens_per_second=1e3, first_token_p99_ms=90.0, per_token_p99_ms=5.0, is_held=is_held)


CAPACITY = CapacityResult(
    model="bundled",
    draft=NONE,
    options="",
    seconds=20.0,
    first_token_ms=200.0,
    per_token_ms=10.0,
    rate=4.0,
    tried=(tried(4.0, is_held=True), tried(8.0, is_held=False)),
    num_processes=1,
    host="here",
)


@pytest.mark.parametrize("capacity", [0.3, 3.0, 16.0, 40.7, 500.0])
async def test_the_search_comes_close_to_the_highest_rate_that_is_held(capacity: float) -> None:
    rates: list[float] = []

    async def is_held(rate: float) -> bool:
        rates.append(rate)
        return rate <= capacity

    found = await highest_rate(is_held, 16.0)
    assert found <= capacity <= 1.05 * found
    assert found in rates
    assert len(rates) < 14


async def test_a_search_without_any_rate_that_is_held_ends() -> None:
    async def is_held(rate: float) -> bool:
        return rate < 0

    assert await highest_rate(is_held, 16.0) == 0


@pytest.mark.parametrize(
    ("records", "cpu_s", "text"),
    [
        ([completed(), replace(completed(), outcome=FAILED, error="3 of 4 tokens")], 1.0, "3 of 4 tokens"),
        ([completed(), replace(completed(), outcome=LEFT)], 1.0, "1 without an end"),
        ([completed()], 1.0, "1 made"),
        ([completed()] * 2, 9.0, "0.90 of a core"),
    ],
)
def test_runs_that_do_not_count(records: list[RequestRecord], cpu_s: float, text: str) -> None:
    run = LoadRun(records, 10.0, cpu_s, 10.0)
    with pytest.raises(InvalidRunError, match=text):
        check(run, report_of(run, 0.0), 2)


def test_a_run_that_counts() -> None:
    run = LoadRun([completed()] * 2, 10.0, 1.0, 10.0)
    check(run, report_of(run, 0.0), 2)


def test_a_file_is_made_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "load_cpu.json"
    for one in (
        result(workload="open32"),
        result(host="old"),
        result(draft=EAGLE3, workload="turns", draft_faults=DraftFaults({"died": 1}, 2.5)),
        result(model="llama-3.1-8b"),
        result(),
    ):
        write_rows(merged(read_rows(path, LoadResult.from_json), one), path)
    found = read_rows(path, LoadResult.from_json)
    assert [one.draft_faults for one in found] == [DraftFaults({"died": 1}, 2.5), None, None, None]
    assert [(one.model, one.draft, one.workload, one.host) for one in found] == [
        ("bundled", EAGLE3, "turns", "here"),
        ("bundled", NONE, "chat", "here"),
        ("bundled", NONE, "open32", "here"),
        ("llama-3.1-8b", NONE, "chat", "here"),
    ]


@pytest.mark.parametrize(("losses", "missing_s", "is_fault"), [(0, 0.0, False), (1, 0.0, True), (0, 0.5, True)])
def test_losses_of_a_draft_are_counted_by_cause(losses: int, missing_s: float, is_fault: bool) -> None:
    before, after = (
        Scrape.read(
            "# TYPE slipstream_draft_losses_total counter\n"
            'slipstream_draft_losses_total{cause="died"} 3\n'
            f'slipstream_draft_losses_total{{cause="timeout"}} {2 + num}\n'
            "# TYPE slipstream_draft_missing_seconds_total counter\n"
            f"slipstream_draft_missing_seconds_total {1 + seconds}\n"
        )
        for num, seconds in ((0, 0.0), (losses, missing_s))
    )
    faults = DraftFaults.of(after.since(before))
    assert faults == DraftFaults({"timeout": losses} if losses else {}, missing_s)
    assert bool(faults) == is_fault
    assert ("timeout 1" in str(faults)) == bool(losses)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_lost_draft_makes_the_result_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path / "logs"))
    make = load._make

    async def with_loss(plan: Plan, server: UpServer, workload: LoadWorkload) -> LoadReport:
        report = await make(plan, server, workload)
        if workload.name == "prefill":
            server.send("draft", signal.SIGKILL)
            await server.until(lambda metrics: bool(metrics.total("slipstream_draft_losses_total")))
        return report

    monkeypatch.setattr(load, "_make", with_loss)
    kept: list[LoadResult] = []
    problems = await measure(Plan(names=("long", "prefill"), drafts=(EAGLE3,), options=PATIENT), kept.append)
    assert [(one.workload, one.draft_faults) for one in kept] == [("long", DraftFaults({}, 0.0))]
    (problem,) = problems
    assert problem.startswith("prefill, draft eagle3: draft losses: died 1, ")
    (log,) = (tmp_path / "logs").iterdir()
    assert "steps go on without a draft" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(("losses", "pid", "text"), [(1, 5, "draft losses: died 1"), (0, 6, "a service died")])
async def test_a_lost_draft_or_a_death_ends_a_search(
    monkeypatch: pytest.MonkeyPatch, losses: int, pid: int, text: str
) -> None:
    server = FakeServer()

    @asynccontextmanager
    async def serve(*_: object) -> AsyncIterator[FakeServer]:
        yield server

    async def serve_requests(_: str, arrivals: Sequence[Arrival], *__: float, num_processes: int) -> LoadRun:
        assert num_processes
        server.losses, server.pid = losses, pid
        return LoadRun([completed() for _ in arrivals], 2.0, 0.5, 2.0)

    monkeypatch.setattr(load, "_server", serve)
    monkeypatch.setattr(load, "open_loop", serve_requests)
    with pytest.raises(InvalidRunError, match=text):
        await find_capacity(Plan(), Search(), EAGLE3)


def test_a_workload_of_prompts_counts_all_tokens() -> None:
    both = {"tokens_per_second": 1.0, "all_tokens_per_second": 9.0}
    assert throughput({"workload": "chat", **both}) == 1.0
    assert throughput({"workload": "prefill", **both}) == 9.0
    assert throughput({"workload": "prefill", "tokens_per_second": 1.0}) is None


def test_capacities_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "capacity_cpu.json"
    write_rows([CAPACITY], path)
    assert read_rows(path, CapacityResult.from_json) == [CAPACITY]
    assert CAPACITY.best == CAPACITY.tried[0]
    assert replace(CAPACITY, rate=0.0).best is None


def test_pictures_of_results_with_and_without_those_of_a_peer(tmp_path: Path) -> None:
    models = ("bundled", "llama-3.1-8b")
    drafts = (EAGLE3, EAGLE3_AUTO, NONE)
    draw_load([result(model=model, draft=draft) for model in models for draft in drafts], tmp_path / "load.png")
    draw_capacity([CAPACITY, replace(CAPACITY, draft=EAGLE3)], tmp_path / "capacity.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("arguments", [["--model", "x"], ["--drafts", "yes,x"], ["--workloads", "chat,x"]])
def test_unknown_names_are_refused(arguments: list[str]) -> None:
    app = typer.Typer()
    app.command()(load.main)
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert arguments[0] in outcome.output
    assert "x: not one of" in outcome.output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_workload_of_the_bundled_model(tmp_path: Path) -> None:
    path = tmp_path / "load_cpu.json"
    app = typer.Typer()
    app.command()(load.main)
    arguments = ["--workloads", "turns", "--drafts", "yes", "--options", PATIENT, "--json", str(path)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(path.read_text())
    assert (row["workload"], row["draft"], row["num_requests"]) == ("turns", EAGLE3, 24)
    assert row["all_tokens_per_second"] == pytest.approx((5621 + 431) / 431 * row["tokens_per_second"], rel=0.01)
    assert 0.5 < row["cached_share"] < 1
    assert 0 < row["first_token_p50_ms"] <= row["first_token_p99_ms"]
    assert path.with_suffix(".png").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_rate_that_a_server_cannot_take_is_not_held() -> None:
    search = Search(first_token_ms=5000.0, per_token_ms=5000.0, seconds=1.0, first_rate=8.0)
    found = await find_capacity(Plan(), search, NONE)
    assert 0 < found.rate < max(one.rate for one in found.tried)
