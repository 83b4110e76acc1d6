"""Counts and sums of a window: from the same two scrapes, or refused."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.benchmarks.stream_window import StepSums, Streaming, TornWindowError, Window, with_draft
from slipstream.client import AsyncClient
from slipstream.common.rpc.metrics import Scrape
from tests.harness.generation_server import generation_server

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
