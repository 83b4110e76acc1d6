"""What `status --watch` shows of one look at a server: a function from numbers to what rich draws."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from slipstream.cli.server_status import HEALTHY
from slipstream.cli.status_watch_numbers import DRAFT, PARTS, VERIFY, finished, kv_pools
from slipstream.scheduler.telemetry.timings import DRAFT_TO_VERIFY, VERIFY_TO_DRAFT, VERIFY_TO_VERIFY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console, ConsoleOptions, RenderableType

    from slipstream.cli.status_watch_look import Look
    from slipstream.cli.status_watch_numbers import DraftNumbers, IntervalNumbers, Latency, Reading, StepNumbers
    from slipstream.common.rpc.scrape import Scrape

NOTHING = "-"
PART_LOOKS = {
    VERIFY_TO_DRAFT: ("lost: verify → draft", "░", "red"),
    DRAFT: ("draft", "▓", "blue"),
    DRAFT_TO_VERIFY: ("lost: draft → verify", "▒", "yellow"),
    VERIFY: ("verify", "█", "green"),
    VERIFY_TO_VERIFY: ("lost: verify → verify", "·", "magenta"),
}
"""Of each part of a step: what it is called, what it is drawn with, and in which colour."""
_WELL, _FAIR = 0.97, 0.90
_MAX_BAR_WIDTH = 100
_MIB = 2**20


def frame(look: Look) -> RenderableType:
    """Everything about one look."""
    parts: list[RenderableType] = [_title(look)]
    if look.event:
        parts.append(Text(look.event, "yellow"))
    if look.reading is None:
        parts.append(Text(f"{look.why_gone}; asked again and again", "bold red"))
    else:
        if look.reading.why_no_metrics:
            parts.append(Text(f"no rates: {look.reading.why_no_metrics}", "bold red"))
        parts.append(_rows(look.reading, look.numbers))
    return Group(*parts)


class StepBar:
    """The parts of a step side by side, each as long as its share."""

    def __init__(self, parts_s: Mapping[str, float]) -> None:
        """Seconds of each of PARTS."""
        self._parts_s = parts_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """As wide as there is room, up to a limit."""
        bar = Text()
        for part, cells in bar_cells(self._parts_s, min(options.max_width, _MAX_BAR_WIDTH)).items():
            _, character, color = PART_LOOKS[part]
            bar.append(character * cells, color)
        yield bar


def bar_cells(parts_s: Mapping[str, float], width: int) -> dict[str, int]:
    """How many of `width` characters each part gets: all of them together, each to within one of its share."""
    total = sum(parts_s.values())
    if not total:
        return dict.fromkeys(parts_s, 0)
    ends = [round(width * end / total) for end in accumulate(parts_s.values(), initial=0.0)]
    return {part: end - start for part, (start, end) in zip(parts_s, pairwise(ends), strict=True)}


def duration(seconds: float | None) -> str:
    """In the unit that suits it."""
    if seconds is None:
        return NOTHING
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _title(look: Look) -> Text:
    title = Text(f"{look.at:%H:%M:%S}", "dim")
    if look.reading is not None:
        status = look.reading.status
        title.append(f"  Slipstream {status.state.version} at {status.server}", "bold not dim")
    if look.numbers is not None:
        title.append(f"  last {look.numbers.seconds:.1f} s")
    return title


def _rows(reading: Reading, numbers: IntervalNumbers | None) -> Table:
    rows = Table.grid(padding=(0, 2), collapse_padding=True)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    if numbers is not None:
        _add_steps(rows, numbers.steps)
        rows.add_row("accept", Text(_accepted(numbers.drafts)))
    _add_requests(rows, reading, numbers)
    rows.add_row("KV", Text(_kv(reading)))
    rows.add_row("runs", Text(_what_runs(reading)))
    rows.add_row("services", _services(reading))
    return rows


def _add_steps(rows: Table, steps: StepNumbers) -> None:
    efficiency = steps.overlap_efficiency
    if efficiency is None:
        rows.add_row("overlap", Text(f"{NOTHING}  no steps"))
        return
    color = "green" if efficiency >= _WELL else "yellow" if efficiency >= _FAIR else "bold red"
    lost = Text(f"{efficiency:.1%}", color).append(f" efficiency: {1 - efficiency:.1%} of the steps' time is lost", "")
    rows.add_row("overlap", lost)
    rates = f"{steps.decode_per_s:.1f} decode and {steps.prefill_per_s:.1f} prefill steps per second"
    rows.add_row("step", Text(f"{duration(steps.decode_step_s)} a decode step; {rates}"))
    if steps.decode_step_s:
        rows.add_row("", StepBar(steps.decode_parts_s))
        rows.add_row("", _parts(steps.decode_parts_s, steps.decode_step_s))


def _parts(parts_s: Mapping[str, float], step_s: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for part in PARTS:
        if part == VERIFY_TO_VERIFY and not parts_s[part]:
            continue  # only where steps have no draft
        name, character, color = PART_LOOKS[part]
        share = f"{parts_s[part] / step_s:.1%}"
        table.add_row(Text(character, color).append(f" {name}", "default"), duration(parts_s[part]), share)
    return table


def _accepted(drafts: DraftNumbers) -> str:
    if drafts.mean_accept_length is None:
        return f"{NOTHING}  no drafts"
    positions = "  ".join(f"{position}: {share:.0%}" for position, share in drafts.accepted_at.items())
    return f"{drafts.mean_accept_length:.2f} tokens a step; accepted at position {positions}"


def _add_requests(rows: Table, reading: Reading, numbers: IntervalNumbers | None) -> None:
    state = reading.status.state
    running = f"{state.num_running} of {state.num_slots} running, {state.num_waiting} of {state.queue_capacity} waiting"
    rows.add_row("requests", Text(running))
    if reading.metrics is not None:
        per_s = {} if numbers is None else numbers.requests.finished_per_s
        rows.add_row("finished", Text(_finished(reading.metrics, per_s)))
    if numbers is not None:
        got = numbers.requests
        tokens = f"{got.tokens_per_s:.1f} generated and {got.prompt_tokens_per_s:.1f} of prompts per second"
        rows.add_row("tokens", Text(tokens))
        latency = f"first token {_latency(got.first_token)}; between tokens {_latency(got.inter_token)}"
        rows.add_row("latency", Text(latency))


def _finished(metrics: Scrape, per_s: Mapping[str, float]) -> str:
    counts = {outcome: count for outcome, count in finished(metrics).items() if count}
    rates = {outcome: f" ({rate:.1f}/s)" for outcome, rate in per_s.items() if rate}
    return ", ".join(f"{count} {outcome}{rates.get(outcome, '')}" for outcome, count in counts.items()) or "none"


def _latency(latency: Latency) -> str:
    return f"p50 {duration(latency.p50_s)}, p90 {duration(latency.p90_s)}"


def _kv(reading: Reading) -> str:
    state = reading.status.state
    used = state.num_pages - state.num_free_pages
    share = f", {used / state.num_pages:.1%}" if state.num_pages else ""
    pools = [] if reading.metrics is None else kv_pools(reading.metrics)
    memory = "".join(
        f"; {pool.service} {pool.used_pages * pool.page_bytes / _MIB:.1f} of "
        f"{pool.pages * pool.page_bytes / _MIB:.1f} MiB"
        for pool in pools
    )
    return f"{used} of {state.num_pages} pages{share}{memory}"


def _what_runs(reading: Reading) -> str:
    state = reading.status.state
    drafting = f", {state.num_draft_tokens} draft tokens a step" if state.algorithm != "none" else ""
    mps = "under MPS" if state.under_mps else "no MPS"
    return (
        f"{state.model}; {state.algorithm}{drafting}; run-ahead {state.run_ahead}; {state.fence} fences, {mps}; "
        f"epoch {state.epoch}"
    )


def _services(reading: Reading) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(overflow="fold")
    for service in reading.status.state.services:
        health = reading.status.health[service.name]
        cells = (service.name, health, f"pid {service.pid}", service.address)
        styles = ("", "green" if health in HEALTHY else "bold red", "", "dim")
        table.add_row(*map(Text, cells, styles))
    return table
