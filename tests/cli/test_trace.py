"""`slipstream trace`: of a running server, and the events of made-up traces."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.trace import fetch_requests, trace_json
from slipstream.cli.trace_timeline import StampClock
from slipstream.client import Client
from slipstream.common.device.interface import bounded_clock
from slipstream.common.wire.events import Event, Site
from slipstream.common.wire.server import ServiceState
from slipstream.common.wire.step import FenceName, FenceWait
from slipstream.common.wire.trace import ClockSample, Trace, TracedProcess, TracedStep
from tests.cli.conftest import ServeState
from tests.harness.grpc_server import running_server, unserved_address
from tests.harness.running import Running, running, slipstream, until
from tests.harness.trace_format import around, arrows, check, slices_by_thread

pytestmark = pytest.mark.timeout(120)


def generate_until_the_end(trace: Running, address: str) -> None:
    """Has the server run short requests for as long as the command waits for steps."""
    with Client(address) as client:
        while not trace.has_ended:
            list(client.generate("class Queue:", ignore_eos=True, max_new_tokens=4))


@pytest.mark.usefixtures("up")
def test_a_trace_of_a_running_server(state_dir: Path, tmp_path: Path) -> None:
    server, out = ("--state-dir", str(state_dir)), tmp_path / "out.json"
    nothing = slipstream("trace", *server, "--wait-s", "0.1", str(out))
    address = (state_dir / "server").read_text()
    with running("trace", *server, "--steps", "20", "--wait-s", "30", str(out)) as trace:
        generate_until_the_end(trace, address)
        assert trace.end() == 0, trace.errors()
        assert trace.errors().startswith("steps ")
        assert f"(one clock) are in {out}: open it in " in trace.errors()
    with running("trace", *server, "--steps", "10", "--wait-s", "30", "-") as to_standard_output:
        generate_until_the_end(to_standard_output, address)
        assert to_standard_output.end() == 0, to_standard_output.errors()
        piped = json.loads(to_standard_output.output())
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert nothing.stderr == "slipstream: error: no step was complete within 0.1 s: ask while requests run\n"
    written = json.loads(out.read_text(encoding="utf-8"))
    for content, num_steps in ((written, 20), (piped, 10)):
        check(content)
        assert content["otherData"]["steps"] == num_steps
        threads = slices_by_thread(content)
        assert {process for process, _ in threads} == {1, 2, 3, 4}
        kernels = [e for e in threads[3, 32] if e["cat"] == "kernel"]
        first = kernels[0]["args"]["step"]
        assert [e["args"]["step"] for e in kernels] == list(range(first, first + num_steps))
    assert list(tmp_path.glob(".*")) == []
    threads = slices_by_thread(written)
    requests = [e for (process, _), slices in threads.items() if process == 4 for e in slices]
    assert {e["name"] for e in requests} == {"tokenise", "submit", "first token"}
    prefills = [e for e in threads[3, 32] if e["name"].startswith("verify prefill")]
    begin, end = threads[1, 12][0]["ts"], threads[3, 32][-1]["ts"]
    waits = [(e["ts"], e["ts"] + e["dur"]) for e in requests if e["name"] == "first token"]
    inside = [(submitted, sent) for submitted, sent in waits if begin <= submitted and sent <= end]
    assert inside
    for submitted, sent in inside:
        # On one clock: the work on a request's prompt begins after it was submitted, before its first token is sent.
        assert any(submitted < e["ts"] < sent for e in prefills)


def test_no_server_at_the_address(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("what was there before")
    with unserved_address() as address:
        found = slipstream("trace", "--server", address, str(out))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"slipstream: error: no answer from a server at {address}: ")
    assert found.stderr.count("\n") == 1
    assert out.read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


async def test_a_gateway_that_does_not_answer_has_no_row(
    serve_state: ServeState, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    address = await serve_state()
    gateways = [
        ServiceState(name="gateway-0", address=address, pid=1),
        ServiceState(name="gateway-1", address=f"unix:{tmp_path}/none/gateway.sock", pid=0),
    ]
    assert await fetch_requests(address, gateways, {}) == ()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("no times of requests from gateway-0: ")
    assert second.startswith("no times of requests from gateway-1: ")


async def test_a_scheduler_that_cannot_be_traced(serve_state: ServeState, tmp_path: Path) -> None:
    async with running_server() as scheduler:
        address = await serve_state(ServiceState(name="scheduler", address=scheduler.address, pid=1))
        found = await asyncio.to_thread(slipstream, "trace", "--server", address, str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == f"slipstream: error: the scheduler at {scheduler.address} is too old to be traced\n"


async def test_a_scheduler_that_cannot_be_reached_from_here(serve_state: ServeState, tmp_path: Path) -> None:
    scheduler = f"unix:{tmp_path}/none/scheduler.sock"
    address = await serve_state(ServiceState(name="scheduler", address=scheduler, pid=1))
    found = await asyncio.to_thread(slipstream, "trace", "--server", address, str(tmp_path / "out.json"))
    assert (found.returncode, found.stdout) == (1, "")
    assert f"no trace from the scheduler at {scheduler}: " in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.usefixtures("up")
def test_ctrl_c_ends_the_wait_and_leaves_nothing(state_dir: Path, tmp_path: Path) -> None:
    with running("trace", "--state-dir", str(state_dir), "--wait-s", "60", str(tmp_path / "out.json")) as trace:
        until(lambda: any(tmp_path.iterdir()), trace)
        trace.signal(signal.SIGINT)
        assert trace.end() != 0
        assert "Traceback" not in trace.errors()
    assert list(tmp_path.iterdir()) == []


STEPS_LANE, LOOP, RESULTS = (1, 11), (1, 12), (1, 13)
DRAFT_HOST, DRAFT_STREAM = (2, 21), (2, 22)
VERIFY_HOST, VERIFY_STREAM = (3, 31), (3, 32)

STAMPED = (Site.STREAM, Site.PREFILL)
US = 1000
START_NS = 7_000_000_000_000


def record(site: Site, step: int, begin_us: float, end_us: float) -> Event:
    """Times count from the beginning of the trace."""
    return Event(site, step, START_NS + round(begin_us * US), START_NS + round(end_us * US))


STEPS = (
    TracedStep(step=8, num_slots=1, num_prompt_tokens=4, has_draft=True),
    TracedStep(
        step=9,
        num_slots=2,
        num_decoding=2,
        num_draft_tokens=3,
        has_draft=True,
        draft_waits=(FenceWait(FenceName.VERIFY_STASH, 8),),
        verify_waits=(FenceWait(FenceName.DRAFT_PROPOSED, 9),),
    ),
    TracedStep(
        step=10,
        num_slots=2,
        num_decoding=2,
        num_draft_tokens=3,
        has_draft=True,
        draft_waits=(FenceWait(FenceName.VERIFY_STASH, 9),),
        verify_waits=(FenceWait(FenceName.DRAFT_PROPOSED, 10),),
    ),
)
"""Step 9 is sent ahead of step 8's result; step 10 is sent late, when both streams have nothing to do."""
SCHEDULER = TracedProcess(
    name="scheduler",
    pid=11,
    records=(
        record(Site.SEND, 8, 0, 10),
        record(Site.SEND, 9, 20, 30),
        record(Site.WAIT, 8, 31, 120.5),
        record(Site.RESULT, 8, 10, 120.5),
        record(Site.TAKE_IN, 8, 120.5, 130),
        record(Site.WAIT, 9, 140, 310),
        record(Site.RESULT, 9, 30, 310),
        record(Site.TAKE_IN, 9, 310, 320),
        record(Site.SEND, 10, 400, 410),
        record(Site.WAIT, 10, 411, 640),
        record(Site.RESULT, 10, 410, 640),
        record(Site.TAKE_IN, 10, 640, 645),
    ),
)
VERIFY = TracedProcess(
    name="verify",
    pid=12,
    model="target",
    records=(
        record(Site.STREAM, 8, 40, 100),
        record(Site.STREAM, 9, 200, 320),
        record(Site.STREAM, 10, 500, 620.125),
        record(Site.RECEIVE, 8, 12, 14),
        record(Site.ENQUEUE, 8, 15, 20),
        record(Site.RECEIVE, 9, 32, 34),
        record(Site.ENQUEUE, 9, 35, 38),
        record(Site.RECEIVE, 10, 412, 414),
        record(Site.ENQUEUE, 10, 415, 420),
    ),
)
DRAFT = TracedProcess(
    name="draft",
    pid=13,
    model="standalone",
    records=(
        record(Site.PREFILL, 8, 42, 60),
        record(Site.STREAM, 9, 107, 190),
        record(Site.STREAM, 10, 430, 490),
        record(Site.RECEIVE, 8, 11, 13),
        record(Site.ENQUEUE, 8, 14, 19),
        record(Site.RECEIVE, 9, 31, 33),
        record(Site.ENQUEUE, 9, 34, 39),
        record(Site.RECEIVE, 10, 411, 413),
        record(Site.ENQUEUE, 10, 414, 418),
    ),
)
TRACE = Trace(
    epoch=3,
    device="cpu",
    fence="host",
    under_mps=False,
    algorithm="standalone",
    run_ahead=1,
    steps=STEPS,
    processes=(SCHEDULER, VERIFY, DRAFT),
    clock_samples=(ClockSample(START_NS, START_NS),),
)


def lane(content: Any, thread: tuple[int, int]) -> list[tuple[str, str, float, float]]:
    """The slices of a lane: kind, name, begin and end in microseconds."""
    slices = slices_by_thread(content)[thread]
    return [(e["cat"], e["name"], e["ts"], round(e["ts"] + e["dur"], 3)) for e in slices]


@pytest.fixture
def content() -> Any:
    """The small trace's file."""
    return trace_json(TRACE)


def test_is_what_the_format_demands(content: Any) -> None:
    check(content)


def test_says_what_it_is_of(content: Any) -> None:
    names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert names == {
        1: "scheduler (process 11)",
        2: "draft (process 13, standalone)",
        3: "verify (process 12, target)",
    }
    about = content["otherData"]
    assert (about["epoch"], about["steps"], about["run_ahead"], about["origin_monotonic_ns"]) == (3, 3, 1, START_NS)


def test_kernels_by_phase_and_what_a_stream_did_between_them(content: Any) -> None:
    assert lane(content, DRAFT_STREAM) == [
        ("kernel", "draft prefill 8", 42, 60),
        ("wait", "wait for verify.stash >= 8", 60, 107),
        ("kernel", "draft decode 9", 107, 190),
        ("idle", "no command", 190, 414),
        # What it would wait for was signalled before.
        ("idle", "start of 10", 414, 430),
        ("kernel", "draft decode 10", 430, 490),
    ]
    assert lane(content, VERIFY_STREAM) == [
        ("kernel", "verify prefill 8", 40, 100),
        ("wait", "wait for draft.proposed >= 9", 100, 200),
        ("kernel", "verify decode 9", 200, 320),
        ("idle", "no command", 320, 415),
        ("wait", "wait for draft.proposed >= 10", 415, 500),
        ("kernel", "verify decode 10", 500, 620.125),
    ]


def test_what_the_hosts_did(content: Any) -> None:
    assert lane(content, LOOP)[:4] == [
        ("host", "send 8", 0, 10),
        ("host", "send 9", 20, 30),
        ("wait", "wait for result of 8", 31, 120.5),
        ("host", "take in 8", 120.5, 130),
    ]
    assert lane(content, VERIFY_HOST)[:2] == [("host", "receive 8", 12, 14), ("host", "enqueue 8", 15, 20)]
    assert slices_by_thread(content)[LOOP][1]["args"] == {"step": 9, "kind": "decode", "slots": 2}


def test_results_one_behind_the_other(content: Any) -> None:
    """Publish comes within verify's work: a result seen before its end was waited for in an unknown part of it."""
    assert lane(content, RESULTS) == [
        ("wait", "wait for verify.publish >= 8", 10, 100),
        ("result", "unseen 8", 100, 120.5),
        ("wait", "wait for verify.publish >= 9, and look", 120.5, 310),
        ("wait", "wait for verify.publish >= 10", 410, 620.125),
        ("result", "unseen 10", 620.125, 640),
    ]


def test_steps_and_their_bubbles(content: Any) -> None:
    """The first has none before it to count from."""
    assert lane(content, STEPS_LANE) == [
        ("step", "step 9, decode", 100, 320),
        ("bubble", "bubble verify → draft", 100, 107),
        ("bubble", "bubble draft → verify", 190, 200),
        ("step", "step 10, decode", 320, 620.125),
        ("bubble", "bubble verify → draft", 320, 430),
        ("bubble", "bubble draft → verify", 490, 500),
    ]


def test_a_bubble_begins_behind_verifys_step_before_where_draft_was_done_meanwhile() -> None:
    """As on a CPU, where verify takes in prompts while draft works."""
    early = [record(Site.STREAM, 10, 250, 310) if r.step == 10 and r.site is Site.STREAM else r for r in DRAFT.records]
    content = trace_json(replace(TRACE, processes=(SCHEDULER, VERIFY, replace(DRAFT, records=tuple(early)))))
    assert lane(content, STEPS_LANE)[-2:] == [
        ("step", "step 10, decode", 320, 620.125),
        ("bubble", "bubble draft → verify", 320, 500),
    ]


def test_no_step_counts_from_before_an_idle_time() -> None:
    idle = replace(SCHEDULER, records=(*SCHEDULER.records, record(Site.IDLE, 9, 321, 399)))
    content = trace_json(replace(TRACE, processes=(idle, VERIFY, DRAFT)))
    check(content)
    assert [name for _, name, _, _ in lane(content, STEPS_LANE) if name.startswith("step")] == ["step 9, decode"]
    assert ("idle", "idle after 9", 321, 399) in lane(content, LOOP)


def test_a_plain_step_has_one_bubble() -> None:
    plain = TracedStep(step=10, num_slots=2, num_decoding=2, has_draft=False)
    draft = replace(DRAFT, records=tuple(r for r in DRAFT.records if r.step < 10))
    content = trace_json(replace(TRACE, steps=(*STEPS[:2], plain), processes=(SCHEDULER, VERIFY, draft)))
    check(content)
    assert lane(content, STEPS_LANE)[-2:] == [
        ("step", "step 10, plain", 320, 620.125),
        ("bubble", "bubble verify → verify", 320, 500),
    ]
    assert lane(content, VERIFY_STREAM)[-1][1] == "verify plain 10"


def test_arrows_lead_along_the_fences(content: Any) -> None:
    slices = slices_by_thread(content)
    led = [
        (begin["name"], *(around(slices[e["pid"], e["tid"]], e["ts"])[-1]["name"] for e in (begin, end)))
        for begin, end in arrows(content)
        if begin["cat"] == "fence"
    ]
    assert sorted(led) == [
        ("draft.proposed", "draft decode 10", "verify decode 10"),
        ("draft.proposed", "draft decode 9", "verify decode 9"),
        ("verify.publish", "verify decode 10", "unseen 10"),
        ("verify.publish", "verify decode 9", "wait for verify.publish >= 9, and look"),
        ("verify.publish", "verify prefill 8", "unseen 8"),
        ("verify.stash", "verify decode 9", "draft decode 10"),
        ("verify.stash", "verify prefill 8", "draft decode 9"),
    ]


def test_arrows_lead_from_the_loop_to_the_hosts_and_on_to_the_streams(content: Any) -> None:
    found = {(b["cat"], (b["pid"], b["tid"]), (e["pid"], e["tid"]), e["ts"]) for b, e in arrows(content)}
    for host, stream, received, worked in ((DRAFT_HOST, DRAFT_STREAM, 31, 107), (VERIFY_HOST, VERIFY_STREAM, 32, 200)):
        assert ("command", LOOP, host, received) in found
        assert ("launch", host, stream, worked) in found


def test_a_drafter_that_records_nothing_is_shown_by_its_stamps() -> None:
    silent = replace(DRAFT, records=tuple(r for r in DRAFT.records if r.site in STAMPED))
    content = trace_json(replace(TRACE, processes=(SCHEDULER, VERIFY, silent)))
    check(content)
    assert DRAFT_HOST not in slices_by_thread(content)
    # Its command went out at 410, which is all that is known.
    assert lane(content, DRAFT_STREAM)[3:5] == [("idle", "no command", 190, 410), ("idle", "start of 10", 410, 430)]


@pytest.mark.parametrize(
    ("begin_us", "end_us", "is_shown"),
    [
        (0 - START_NS / US, 0 - START_NS / US, False),
        (107, 60, False),
        (107, 1e15, False),
        (107, 1e6, True),
        (50, 190, True),
    ],
)
def test_stamps_that_a_drafter_made_up(begin_us: float, end_us: float, is_shown: bool) -> None:
    """Stamps of step 9: none, back in time, far ahead, longer than the next step, before the last step was over."""
    stamp = record(Site.STREAM, 9, begin_us, end_us)
    records = [r for r in DRAFT.records if (r.site, r.step) != (Site.STREAM, 9)]
    content = trace_json(replace(TRACE, processes=(SCHEDULER, VERIFY, replace(DRAFT, records=(stamp, *records)))))
    check(content)
    names = [name for kind, name, _, _ in lane(content, DRAFT_STREAM) if kind == "kernel"]
    assert ("draft decode 9" in names) is is_shown
    assert content["otherData"]["origin_monotonic_ns"] == START_NS


def test_without_a_draft() -> None:
    steps = tuple(replace(s, num_draft_tokens=0, has_draft=False, draft_waits=(), verify_waits=()) for s in STEPS)
    content = trace_json(replace(TRACE, steps=steps, processes=(SCHEDULER, VERIFY)))
    check(content)
    assert {process for process, _ in slices_by_thread(content)} == {1, 3}


def test_a_rank_after_the_first_has_a_lane_before_the_gateways() -> None:
    work = (record(Site.STREAM, 8, 45, 90), record(Site.COLLECTIVES, 8, 45, 65), record(Site.STREAM, 8, 91, 99))
    rank = TracedProcess(name="verify rank 1", pid=14, records=(*work, record(Site.STREAM, 9, 205, 300)))
    gateway = TracedProcess(name="gateway", pid=21, records=(record(Site.TOKENISE, 4, 1, 2),))
    content = trace_json(replace(TRACE, processes=(SCHEDULER, VERIFY, rank, DRAFT, gateway)))
    check(content)
    assert lane(content, (4, 4000)) == [
        ("kernel", "prefill 8", 45, 90),
        ("kernel", "prefill 8", 91, 99),
        ("kernel", "decode 9", 205, 300),
    ]
    first = slices_by_thread(content)[4, 4000][0]["args"]
    assert (first["step"], first["busy us"], first["in collectives us"]) == (8, 25, 20)
    assert lane(content, (5, 5000)) == [("request", "tokenise", 1, 2)]
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert "verify rank 1 (process 14)" in names


def test_requests_of_gateways_until_their_first_token() -> None:
    def phases(job: int, *times_us: float) -> tuple[Event, ...]:
        sites = (Site.TOKENISE, Site.SUBMIT, Site.FIRST_TOKEN)
        return tuple(record(site, job, *times) for site, times in zip(sites, pairwise(times_us), strict=False))

    long_over, overlapping, behind = phases(5, -90, -80, -70, -1), phases(7, 50, 60, 70), phases(9, 700, 710)
    first, later = phases(6, 5, 20, 30, 125), phases(8, 130, 140, 150, 325)
    gateways = (
        TracedProcess(name="gateway-0", pid=21, records=(*long_over, *first, *overlapping, *later, *behind)),
        TracedProcess(name="gateway-1", pid=22, records=phases(4, 1, 2, 3)),
    )
    content = trace_json(replace(TRACE, processes=(*TRACE.processes, *gateways)))
    check(content)
    assert lane(content, (4, 4000)) == [
        ("request", "tokenise", 5, 20),
        ("request", "submit", 20, 30),
        ("request", "first token", 30, 125),
        ("request", "tokenise", 130, 140),
        ("request", "submit", 140, 150),
        ("request", "first token", 150, 325),
    ]
    assert lane(content, (4, 4001)) == [("request", "tokenise", 50, 60), ("request", "submit", 60, 70)]
    assert lane(content, (5, 5000)) == [("request", "tokenise", 1, 2), ("request", "submit", 2, 3)]
    assert set(slices_by_thread(content)) - set(slices_by_thread(trace_json(TRACE))) == {
        (4, 4000),
        (4, 4001),
        (5, 5000),
    }


def test_nanoseconds_are_kept() -> None:
    """Far from the host's boot a double still tells them apart, as times count from the first event."""
    late = START_NS + 123
    records = (Event(Site.STREAM, 8, late, late + 1), Event(Site.STREAM, 9, late + 1, late + 1_000_000_007))
    content = trace_json(replace(TRACE, processes=(SCHEDULER, replace(VERIFY, records=records))))
    first, second = slices_by_thread(content)[VERIFY_STREAM]
    assert (first["ts"], first["dur"]) == (0.123, 0.001)
    assert (second["ts"], second["dur"]) == (0.124, 1_000_000.006)


def test_goes_over_the_wire_and_back() -> None:
    assert Trace.from_pb(TRACE.to_pb()) == TRACE


class TestClocks:
    """The stamps' clock and the host's."""

    def test_between_two_samples_they_drift_evenly(self) -> None:
        clock = StampClock([ClockSample(1_000, 501_000, 40), ClockSample(2_001_000, 2_501_600, 90)])
        assert clock.host_ns(1_000) == 501_000
        assert clock.host_ns(2_001_000) == 2_501_600
        assert clock.host_ns(1_001_000) == 1_501_300
        assert clock.uncertainty_ns == 90

    def test_of_samples_that_tell_nothing_of_the_drift_the_better_one_counts(self) -> None:
        clock = StampClock([ClockSample(1_000, 501_000, 90), ClockSample(2_001_000, 2_901_000, 400_000)])
        assert clock.host_ns(2_001_000) == 2_501_000
        assert clock.uncertainty_ns == 90

    def test_one_sample_is_a_distance(self) -> None:
        assert StampClock([ClockSample(100, 50)]).host_ns(1_000_000_000) == 999_999_950

    def test_stamps_of_another_clock_land_between_the_host_events_around_them(self) -> None:
        ahead = 5_000_000_000_000
        shifted = [
            replace(
                process,
                records=tuple(
                    r._replace(begin_ns=r.begin_ns + ahead, end_ns=r.end_ns + ahead) if r.site in STAMPED else r
                    for r in process.records
                ),
            )
            for process in TRACE.processes
        ]
        samples = tuple(ClockSample(host + ahead, host, 1500) for host in (START_NS, START_NS + 1_000_000))
        content = trace_json(replace(TRACE, processes=tuple(shifted), clock_samples=samples))
        expected = trace_json(TRACE)
        assert content["traceEvents"] == expected["traceEvents"]
        assert content["otherData"]["clock_uncertainty_us"] == 1.5

    def test_the_tightest_bounds_of_several_looks_count(self) -> None:
        """The clocks are 1,000 apart. One look was slow on the way there, the other on the way back."""
        readings = [(5_000, 7_000, 8_010), (8_990, 8_000, 12_000)]
        assert bounded_clock(readings) == ClockSample(8_000, 9_000, 10)
