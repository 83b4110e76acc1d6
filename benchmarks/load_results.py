"""Results of `load.py`, and the sections of the pages that show them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from slipstream.benchmarks.load_workloads import NAMES
from slipstream.benchmarks.models import EAGLE3, EAGLE3_AUTO, NONE
from slipstream.benchmarks.pages import RESULTS, WRITTEN, load, markdown_table, section, text
from slipstream.benchmarks.result_files import read_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.benchmarks.load_report import LoadReport
    from slipstream.common.rpc.scrape import Scrape

PROMPT_WORKLOADS = ("prefill", "ctx8k")
"""Their throughput is that of all tokens; of the others, that of the output."""
PEER = "vLLM 0.22.0"
PEER_RESULTS = "load_vllm_h200"
CAPACITY = "capacity_h200"
README_MODEL = "llama-3.1-8b"
README_WORKLOADS = {
    "chat": "chats, 64 at a time",
    "chat256": "chats, 256 at a time",
    "turns": "32 conversations",
}
DRAFTS = {EAGLE3: "EAGLE-3", EAGLE3_AUTO: "EAGLE-3, auto", NONE: "none"}
"""Draft settings, in the order of the tables."""


@dataclass(frozen=True, slots=True)
class DraftFaults:
    """How often a draft was lost, and for how long none took part although one was expected. False if never."""

    losses: dict[str, int]
    """By cause; those that happened."""
    missing_s: float

    @classmethod
    def of(cls, gained: Scrape) -> Self:
        """Takes both from the difference of two scrapes of the scheduler."""
        losses = gained.by("cause", "slipstream_draft_losses_total")
        return cls(
            losses={cause: round(count) for cause, count in losses.items() if count},
            missing_s=round(gained.total("slipstream_draft_missing_seconds_total"), 3),
        )

    def __bool__(self) -> bool:
        return bool(self.losses or self.missing_s)

    def __str__(self) -> str:
        causes = ", ".join(f"{cause} {count}" for cause, count in self.losses.items())
        return f"draft losses: {causes or 'none'}, {self.missing_s:.1f} s without a draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One workload with one draft setting."""

    model: str
    draft: str
    workload: str
    options: str
    """Further options of `slipstream up`."""
    num_requests: int
    seconds: float
    tokens_per_second: float
    """Output tokens per second, until the last request has ended."""
    all_tokens_per_second: float
    """The same with the tokens of the prompts."""
    first_token_p50_ms: float
    first_token_p99_ms: float
    per_token_p50_ms: float
    """The mean of each request behind its first token."""
    per_token_p99_ms: float
    message_gap_p50_ms: float
    cached_share: float
    """The part of the prompts' tokens that was in the prefix cache."""
    mean_accept_length: float
    lateness_p99_ms: float
    """Time from when a request was due until it was made; a part of its latencies."""
    num_processes: int
    """Processes of the clients."""
    client_cpu_share: float
    """CPU time of the busiest of them, as a share of one core."""
    host: str
    draft_faults: DraftFaults | None = None
    """None in a result from before they were counted."""

    @classmethod
    def from_json(cls, *, draft_faults: Mapping[str, Any] | None = None, **fields: Any) -> Self:
        """Reads it from a result file."""
        return cls(draft_faults=DraftFaults(**draft_faults) if draft_faults else None, **fields)

    @classmethod
    def of(cls, report: LoadReport, **about: Any) -> Self:
        """Makes the result from the report of the whole run. `about`: the fields that are not in it."""
        return cls(
            num_requests=report.num_requests,
            seconds=round(report.seconds, 2),
            tokens_per_second=round(report.tokens_per_second, 1),
            all_tokens_per_second=round(report.all_tokens_per_second, 1),
            first_token_p50_ms=report.ttft_ms.p50,
            first_token_p99_ms=report.ttft_ms.p99,
            per_token_p50_ms=report.time_per_token_ms.p50,
            per_token_p99_ms=report.time_per_token_ms.p99,
            message_gap_p50_ms=report.message_gap_ms.p50,
            cached_share=round(report.cached_share, 4),
            mean_accept_length=round(report.mean_accept_length, 3),
            lateness_p99_ms=report.lateness_ms.p99,
            client_cpu_share=round(report.generator_cpu_share, 3),
            **about,
        )

    @property
    def key(self) -> tuple[str, int, int]:
        """A file has one result for each, and is sorted by it."""
        return self.model, list(DRAFTS).index(self.draft), NAMES.index(self.workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRate:
    """One rate of a search."""

    rate: float
    tokens_per_second: float
    first_token_p99_ms: float
    per_token_p99_ms: float
    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityResult:
    """The highest rate that keeps both limits, with one draft setting."""

    model: str
    draft: str
    options: str
    seconds: float
    """Length of each rate."""
    first_token_ms: float
    """Limit of the 99th percentile."""
    per_token_ms: float
    """Limit of the 99th percentile of the requests' means."""
    rate: float
    """Requests per second; 0 if even the lowest rate that was tried is too high."""
    tried: tuple[TriedRate, ...]
    num_processes: int
    host: str

    @classmethod
    def from_json(cls, *, tried: Sequence[Mapping[str, Any]], **fields: Any) -> Self:
        """Reads it from a result file."""
        return cls(tried=tuple(TriedRate(**one) for one in tried), **fields)

    @property
    def key(self) -> tuple[str, int]:
        """A file has one result for each, and is sorted by it."""
        return self.model, list(DRAFTS).index(self.draft)

    @property
    def best(self) -> TriedRate | None:
        """The figures at the highest rate; None if there is none."""
        return next((one for one in self.tried if one.rate == self.rate), None)


Result = TypeVar("Result", LoadResult, CapacityResult)


def merged(old: Sequence[Result], new: Result) -> list[Result]:
    """The old results with the new one in its place, sorted."""
    results: list[Result] = [result for result in old if result.key != new.key]
    results.append(new)
    return sorted(results, key=lambda result: result.key)


def peer_results(model: str) -> dict[tuple[str, str], dict[str, float]]:
    """Returns what was measured of the peer, by draft and workload."""
    return {(row["draft"], row["workload"]): row for row in load(PEER_RESULTS)["results"] if row["model"] == model}


def throughput(row: Mapping[str, Any]) -> float | None:
    """Returns the tokens per second that a row's workload is about; None if they were not measured."""
    name = "all_tokens_per_second" if row["workload"] in PROMPT_WORKLOADS else "tokens_per_second"
    value: float | None = row.get(name)
    return value


def readme_rows() -> list[str]:
    """The README's rows of whole requests beside the peer's, as far as they were measured."""
    peer, rows = peer_results(README_MODEL), []
    found = {
        r.workload: r.tokens_per_second
        for r in read_rows(RESULTS / "load_h200.json", LoadResult.from_json)
        if r.model == README_MODEL and r.draft == EAGLE3
    }
    for workload, words in README_WORKLOADS.items():
        if (ours := found.get(workload)) is not None:
            theirs = peer[EAGLE3, workload]["tokens_per_second"]
            title = f"{words}, 8B shape, EAGLE-3 head; baseline: {PEER}"
            rows.append(f"{title} | {ours:,.0f} tokens/s | {theirs:,.0f} tokens/s | {ours / theirs:.2f}")
    return rows


def load_sections(name: str) -> list[str]:
    """The sections of a file's results: for each model throughput and latencies by workload, beside the peer's."""
    results = read_rows(RESULTS / f"{name}.json", LoadResult.from_json)
    if not results:
        return []
    hosts = "; ".join(dict.fromkeys(result.host for result in results))
    share = max(result.client_cpu_share for result in results)
    words = (
        "Whole requests through `slipstream up` and its Python client, greedy; `load.py` says what each workload is. "
        "Tokens/s are those of the output, and of prompts and output in "
        f"{' and '.join(PROMPT_WORKLOADS)}. Latencies count from the time at which a request had to be made; the time "
        "per token is a request's mean behind its first one; cached is the part of the prompts' tokens that was in the "
        "prefix cache. Rows that the last run left out are of an earlier one. The busiest client took "
        f"{share:.2f} of a core."
    )
    parts = section("Whole requests", "load", name, hosts, words)
    for model in dict.fromkeys(result.model for result in results):
        mine = [result for result in results if result.model == model]
        peer = peer_results(model)
        parts += [f"### {model}", _load_table(mine, peer)]
        if peer:
            link = f"[JSON](../benchmarks/results/{PEER_RESULTS}.json)"
            parts.append(text(f"In parentheses: {PEER}, {link}. {load(PEER_RESULTS)['about']}"))
    return [*parts, f"![Throughput and latencies by workload](../benchmarks/results/{name}.png)"]


def _load_table(results: Sequence[LoadResult], peer: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    header = (
        "workload | draft | tokens/s | first token p50, ms | p99 | per token p50, ms | p99 | message gap, ms | cached"
    )
    times = ("first_token_p50_ms", "first_token_p99_ms", "per_token_p50_ms", "per_token_p99_ms", "message_gap_p50_ms")
    rows = []
    for result in results:
        ours, theirs = asdict(result), peer.get((result.draft, result.workload), {"workload": result.workload})
        cells = [_cell(throughput(ours), throughput(theirs), 0)]
        cells += [_cell(ours[name], theirs.get(name), 1) for name in times]
        rows.append(" | ".join((result.workload, DRAFTS[result.draft], *cells, f"{100 * result.cached_share:.0f} %")))
    return markdown_table(header, rows)


def _cell(ours: float | None, theirs: float | None, digits: int) -> str:
    found = [f"{value:,.{digits}f}" for value in (ours, theirs) if value is not None]
    return found[0] if len(found) == 1 else f"{found[0]} ({found[1]})"


def capacity_section() -> str:
    """The measured part of `docs/capacity.md`, from the results that there are."""
    results = read_rows(RESULTS / f"{CAPACITY}.json", CapacityResult.from_json)
    if not results:
        return "\n\n".join([text(WRITTEN), text("Nothing was measured yet.")])
    rows, limits = [" | ".join((one.model, DRAFTS[one.draft], *_capacity_cells(one))) for one in results], results[0]
    header = "model | draft | requests/s | output tokens/s | first token p99, ms | per token p99, ms"
    words = (
        "The highest rate of requests at which the 99th percentiles of two latencies stay below their limits: "
        f"{limits.first_token_ms:g} ms to the first token, from the time at which a request had to be made, and "
        f"{limits.per_token_ms:g} ms per token, the mean of a request behind its first one. Requests come as a Poisson "
        "process with lengths of chats: about 200 tokens in and out, 2,000 and 1,000 at most. Weights are "
        "random; the EAGLE-3 head drafts 4 tokens, of which chance accepts so many that a step brings 3.5. "
        f"Each rate was tried once, for {limits.seconds:g} s, the first quarter of which is left out, which is "
        "short: compare the rows, and measure your own server for longer."
    )
    links = f"[`load.py`](../benchmarks/load.py) `--capacity`, [JSON](../benchmarks/results/{CAPACITY}.json); "
    where = links + "; ".join(dict.fromkeys(one.host for one in results))
    picture = f"![Latencies by rate](../benchmarks/results/{CAPACITY}.png)"
    return "\n\n".join([text(WRITTEN), text(words), text(f"{where}."), markdown_table(header, rows), picture])


def _capacity_cells(result: CapacityResult) -> tuple[str, ...]:
    if result.best is None:
        return "0", "", "", ""
    best = result.best
    latencies = f"{best.first_token_p99_ms:.0f}", f"{best.per_token_p99_ms:.1f}"
    return f"{best.rate:.1f}", f"{best.tokens_per_second:,.0f}", *latencies
