"""Windows of streams, gaps in what clients saw, and how soon a draft is as good as before."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.benchmarks.streams import (
    JobLog,
    Message,
    StepSums,
    Streaming,
    Streams,
    TornWindowError,
    Window,
    with_draft,
)
from slipstream.benchmarks.swap import BIN_TOKENS, NUM_BINS, Recovery
from slipstream.client import AsyncClient
from slipstream.common.rpc.metrics import Scrape
from tests.harness.generation_server import generation_server

STEP = (True, True, True, False)
"""Three accepted draft tokens, and the bonus token."""


def job(*times: float, is_draft: tuple[bool, ...] = STEP) -> JobLog:
    return JobLog([Message(at, is_draft) for at in times])


@pytest.mark.parametrize(
    ("start", "end", "begun_after", "gaps"),
    [
        (0.0, 20.0, 0.0, [1.0, 3.0]),
        (1.05, 8.0, 0.0, [0.1]),
        (0.5, 0.6, 0.0, [1.0]),
        (0.0, 20.0, 0.5, [0.5, 3.0]),
        (2.0, 8.0, 0.0, []),
    ],
)
def test_a_gap_is_between_messages_of_one_job(start: float, end: float, begun_after: float, gaps: list[float]) -> None:
    streams = Streams("unix:nowhere", 2, 1000)
    streams.streams[0].jobs = [job(0.0, 1.0, 1.1), job(9.0, 9.5)]
    streams.streams[1].jobs = [job(15.0, 18.0)]
    assert streams.longest_gaps(start, end, begun_after=begun_after) == pytest.approx(gaps)


async def test_what_this_process_does_holds_up_no_client_unseen() -> None:
    streams = Streams("unix:nowhere", 1, 1000)
    (stream,) = streams.streams
    stream.jobs = [job(0.0, 1.0), job(2.0)]
    threshold = gc.get_threshold()
    async with streams.running():
        streams.errors.append("stops the clients")
        assert gc.get_threshold()[2] > 1000 * threshold[2]
    assert gc.get_threshold() == threshold
    streams.errors.clear()
    settling = asyncio.create_task(streams.settle())
    await asyncio.sleep(0)
    assert (settling.done(), len(stream.jobs)) == (False, 1)
    stream.jobs[-1].messages.append(Message(time.monotonic() + 1.0, STEP))
    streams._news.set()
    await settling


async def test_acceptance_is_back_where_steps_are_as_few_as_with_the_draft_from_the_beginning() -> None:
    streams = Streams("unix:nowhere", 2, 1000)
    reference = list(STEP) * 200
    slow = [Message(at, (False,)) for at in range(50)]
    after = [Message(100.0 + at, STEP) for at in range(100)]
    poor = [Message(60.0 + at, (False,)) for at in range(30)]
    # One stream has no draft for the first 30 tokens after the return; the job of the other began behind it.
    streams.streams[0].jobs = [JobLog([*slow, *poor, *after])]
    streams.streams[1].jobs = [JobLog(after)]
    recovery = Recovery()
    recovery.add(streams, 55.0, [reference, reference])
    assert recovery.shares[0] == pytest.approx(0.25, abs=0.03)
    assert recovery.shares[1] < 0.95
    assert recovery.shares[2:] == pytest.approx([1.0] * (NUM_BINS - 2), abs=0.2)
    assert recovery.tokens is not None
    assert recovery.tokens >= 2 * BIN_TOKENS


def test_acceptance_that_does_not_come_back_is_said() -> None:
    recovery = Recovery()
    assert recovery.tokens is None
    recovery.steps, recovery.expected_steps = [20] * NUM_BINS, [10] * NUM_BINS
    assert recovery.tokens is None
    recovery.expected_steps = [10] + [20] * (NUM_BINS - 1)
    assert recovery.tokens == BIN_TOKENS
    recovery.expected_steps = [20, 10, *[20] * (NUM_BINS - 2)]
    assert recovery.tokens == 0, "one place that is poor by chance does not count"
    recovery.expected_steps = [20, 10] + [10] * (NUM_BINS - 2)
    assert recovery.tokens is None


LABELS = {"fence": "host", "mps": "off", "algorithm": "standalone"}


def scrape(num_steps: int, *, num_busy: int | None = None, num_first: int = 0) -> Scrape:
    """A scheduler after `num_steps` decode steps of 1 + 3 ms with a bubble of 0.5 ms.

    `num_busy`: those whose busy time is counted; `num_first`: those of which only the busy time counts.
    """
    num_busy = num_steps if num_busy is None else num_busy
    labels = ",".join(f'{name}="{value}"' for name, value in LABELS.items())
    return Scrape.read(
        f"# TYPE slipstream_step_seconds histogram\n"
        f'slipstream_step_seconds_bucket{{{labels},phase="decode",le="+Inf"}} {num_steps}\n'
        f'slipstream_step_seconds_count{{{labels},phase="decode"}} {num_steps}\n'
        f'slipstream_step_seconds_sum{{{labels},phase="decode"}} {0.0045 * num_steps}\n'
        f'slipstream_step_seconds_bucket{{{labels},phase="prefill",le="+Inf"}} 7\n'
        f'slipstream_step_seconds_count{{{labels},phase="prefill"}} 7\n'
        f'slipstream_step_seconds_sum{{{labels},phase="prefill"}} 7\n'
        f"# TYPE slipstream_busy_seconds_total counter\n"
        f'slipstream_busy_seconds_total{{{labels},phase="decode",service="draft"}} {0.001 * (num_busy + num_first)}\n'
        f'slipstream_busy_seconds_total{{{labels},phase="decode",service="verify"}} {0.003 * (num_busy + num_first)}\n'
        f"# TYPE slipstream_bubble_seconds_total counter\n"
        f'slipstream_bubble_seconds_total{{{labels},phase="decode",edge="verify_to_draft"}} {0.0005 * num_steps}\n'
    )


def test_counts_and_sums_are_of_the_same_steps() -> None:
    sums = StepSums.of(scrape(110, num_first=1).since(scrape(10, num_first=1)))
    assert sums.num_steps == 100
    assert sums.mean_ms(sums.step_s) == pytest.approx(4.5)
    assert sums.mean_ms(sums.draft_s + sums.verify_s + sums.bubble_s) == pytest.approx(4.5)
    about: dict[str, Any] = {"elapsed_s": 2.0, "num_tokens": 500, "cpu_s": {"draft": 0.25}, "first_tokens": [[7]]}
    window = Window(**asdict(sums), **about, mean_accept_length=3.5, fence="host", has_mps=False)
    both = window + window
    assert (both.num_steps, both.step_s, both.cpu_s) == (200, pytest.approx(0.9), {"draft": 0.5})
    assert both.tokens_per_second == window.tokens_per_second == 250


@pytest.mark.parametrize("num_busy", [109, 111, 112])
def test_a_step_that_is_in_one_sum_and_not_in_the_other_is_refused(num_busy: int) -> None:
    with pytest.raises(TornWindowError, match="of 100 steps are neither busy nor bubbles"):
        StepSums.of(scrape(110, num_busy=num_busy).since(scrape(10)))


def test_a_window_without_steps_is_refused() -> None:
    with pytest.raises(TornWindowError):
        StepSums.of(scrape(10).since(scrape(10)))


@pytest.mark.parametrize(
    ("tokens", "error", "raised", "text"),
    [
        ([7] * 96, None, TornWindowError, "ended too early: it had 96 tokens"),
        ([7], ValueError("no such prompt"), ValueError, "no such prompt"),
    ],
)
async def test_a_request_that_ends_before_its_window_is_told(
    tokens: list[int], error: Exception | None, raised: type[Exception], text: str
) -> None:
    async def stream() -> None:
        if error is not None:
            raise error

    streams = [asyncio.create_task(stream())]
    await asyncio.wait(streams)
    with pytest.raises(raised, match=text):
        Streaming(streams, [tokens]).check_begin(16)


async def test_requests_that_never_get_warm_are_told() -> None:
    stream: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(60))
    with pytest.raises(TimeoutError, match="not all requests have 16 tokens"):
        Streaming([stream], [[7] * 15]).check_begin(16)
    Streaming([stream], [[7] * 16]).check_begin(16)
    stream.cancel()


class Scripted:
    """In place of a client: one state of the server after the other."""

    def __init__(self, *draft_states: str) -> None:
        self.states = [SimpleNamespace(draft_state=state) for state in draft_states]

    async def server_info(self) -> SimpleNamespace:
        """The next state."""
        return self.states.pop(0)


async def test_a_draft_that_attaches_late_is_waited_for() -> None:
    client = Scripted("missing", "catching up", "attached", "missing")
    assert (await with_draft(cast("AsyncClient", client))).draft_state == "attached"
    assert len(client.states) == 1


async def test_no_draft_is_waited_for_where_none_is_expected() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        assert (await with_draft(client)).draft_state == ""
