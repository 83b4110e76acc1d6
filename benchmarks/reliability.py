"""Figures of faults and loads: sections of the measured pages, and the cells of docs/reliability.md."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from slipstream.benchmarks.probes import MOST_STALL_MS, PROBES, name_of
from slipstream.benchmarks.sections import load, markdown_table, section, table_of, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MARKED = re.compile(r"(<!-- figure: (\w+)_(cpu|h200)(?: ([\w ,.-]+))? -->)(.*?)(<!-- end -->)")
SOAK_PICTURE = "![Memory, threads, descriptors and pages over the run](../benchmarks/results/soak_cpu.png)"


def sections(where: str) -> list[str]:
    """The sections of what was measured on "cpu" or "h200"."""
    makers = {"outages": _outages, "swap": _swaps, "soak": _soak, "probes": _probes}
    names = {f"{name}_{where}": make for name, make in makers.items()}
    return [part for name, make in names.items() if load(name) is not None for part in make(name)]


def filled(page: str) -> str:
    """The page with the text of every marked cell made anew from the results."""

    def cell(match: re.Match[str]) -> str:
        begin, name, where, arguments, _, end = match.groups()
        given = (arguments or "").split()
        options = zip(("services", "faults", "model", "mps"), given if name == "outages" else (), strict=False)
        words = [f"benchmarks/{name}.py", *(f"--{option} {value}" for option, value in options)]
        words += ["--device cuda"] if where == "h200" else []
        return f"{begin}{CELLS[name](where, *given) or f'not measured yet: `{chr(32).join(words)}`'}{end}"

    return _MARKED.sub(cell, page)


def _outages(name: str) -> list[str]:
    runs = load(name)
    num_jobs, num_errors = sum(run["jobs"] for run in runs), sum(len(run["errors"]) for run in runs)
    words = (
        "Services of `slipstream up` under streaming clients of the Python library, half of them with Generate and "
        "half with WatchJob: killed (SIGKILL), ended (SIGTERM), stopped for good (SIGSTOP, so `up` has to find it) or "
        f"paused for 2 s, in turns. {num_jobs:,} jobs ended with the tokens of a run without faults, {num_errors} did "
        "not. Gaps are between two tokens of a stream: the longest around the fault, the longest that began more than "
        "half a second later until the service was back, and half a second without a fault. Back is when all services "
        "are there and drafts are made. Numbers without a fault that differ widely come from other work on the machine."
    )
    if any(run["plan"]["model"] != "bundled" for run in runs):
        words += " Tokens of a larger model depend on the batch: there only their number is compared."
    hosts = dict.fromkeys(run["host"] for run in runs)
    if len(hosts) > 1:
        words += " Rows are of several machines."
    parts = section("Services that die, hang and end", "outages", name, "; ".join(hosts), words)
    header = "service | fault | times | gap p50, ms | worst | later, worst | back p50, s | worst"
    cells = (
        "{service} | {fault} | {times} | {gap_p50_ms:.0f} | {gap_worst_ms:.0f} | {later_gap_worst_ms:.0f} | "
        "{back_p50_s:.1f} | {back_worst_s:.1f}"
    )
    for model, mps in dict.fromkeys((run["plan"]["model"], run["plan"]["mps"]) for run in runs):
        mine = [run for run in runs if (run["plan"]["model"], run["plan"]["mps"]) == (model, mps)]
        calm, plan = [run["undisturbed"] for run in mine], mine[-1]["plan"]
        gaps = " | ".join(_span(run[key] for run in calm) for key in ("gap_p50_ms", "gap_worst_ms"))
        rows = [cells.format_map(row) for run in mine for row in run["outages"]]
        where = f", MPS {mps}" if plan["device"] == "cuda" else ""
        rates, steps = (_span(run[key] for run in calm) for key in ("tokens_per_second", "step_ms"))
        watchdog = _span(run["watchdog_ms"] for run in mine)
        setup = (
            f"{'Bundled models' if model == 'bundled' else model}{where}, {plan['clients']} clients: undisturbed "
            f"{rates} tokens/s and {steps} ms a step, which waits for the draft {watchdog} ms at most."
        )
        notes = dict.fromkeys(run["note"] for run in mine if "note" in run)
        parts += [text(" ".join((setup, *notes))), markdown_table(header, [f"none |  |  | {gaps} |  |  | ", *rows])]
    return parts


def _swaps(name: str) -> list[str]:
    found = load(name)
    for row in found["swaps"]:
        row["undone"] = " (taken off again)" if row["rolled_back"] else ""
        row["tokens"] = _number(row["recovery_tokens"])
    cells = (
        "{before} → {after}{undone} | {gap_p50_ms:.0f} | {gap_worst_ms:.0f} | {calm_gap_worst_ms:.0f} | "
        "{accept_length_before:.2f} → {accept_length_after:.2f} | {step_ms_before:.2f} → {step_ms_after:.2f} | {tokens}"
    )
    words = (
        f"The draft of `slipstream up` swapped under {found['plan']['clients']} streaming clients with the bundled "
        "models; the last draft has random weights. Gaps are between two tokens of a stream from the call to half a "
        "second after the answer, and in 3 s before. The last column is the number of tokens of a stream until the "
        "accept length is 95 % of that of the same tokens with the draft from their beginning. After a kill of the "
        f"standalone draft it is {_number(found['return']['tokens'])} ({found['plan']['kills']} kills). "
        f"{found['jobs']} jobs had the tokens of the undisturbed run, {len(found['errors'])} had not."
    )
    header = "swap | gap p50, ms | worst | before, worst | accept length | step, ms | tokens to 95 %"
    return section("Swapped drafts", "swap", name, found["host"], words, table_of(header, cells, found["swaps"]))


def _soak(name: str) -> list[str]:
    found = load(name)
    for row in found["growths"]:
        row["in_use"] = row["quantity"].replace("_mib", ", MiB")
    words = (
        f"{found['plan']['clients']} clients that come, cancel, leave and return, and "
        f"{len(found['faults'])} faults of all services: {_soak_cell(name.rpartition('_')[2])}. The table has what "
        "`up`, and the process of each service that lived longest, gained behind the first third of its life: by the "
        "median slope of all pairs of samples, with its 95 % confidence interval, and the bound. After each pause "
        "workers first take in a prompt of each number of rows for which oneDNN keeps a kernel. "
        f"{found['plan']['note']}"
    ).rstrip()
    header = "process | in use | seconds | gained | 95 % | at most"
    cells = "{service} | {in_use} | {seconds:.0f} | {gained:+.2f} | {low:+.2f} to {high:+.2f} | {bound:.2f}"
    more = [table_of(header, cells, found["growths"])] if found["growths"] else []
    return section("Faults of all services for long", "soak", name, found["host"], words, *more, SOAK_PICTURE)


def _probes(name: str) -> list[str]:
    found = load(name)
    loads = {name_of(probe): (probe.__doc__ or "").rstrip(".") for probe in PROBES}
    for row in found["probes"]:
        row |= {"load": loads[row["name"]], "answers": ", ".join(f"{n:,} {code}" for code, n in row["codes"].items())}
    words = (
        f"Each load for {found['seconds']:g} s or more, with dummy kernels in place of the models; health is checked "
        "meanwhile. *Loop held* is the longest piece of work on the gateway's event loop, in CPU time of its thread; "
        f"the aim is {MOST_STALL_MS:g} ms. Clients, checks and services share the cores."
    )
    header = "load | answers | loop held, ms | health p50, ms | p99, ms"
    cells = "{load} | {answers} | {stall_ms:.1f} | {health_p50_ms:.1f} | {health_p99_ms:.1f}"
    table = table_of(header, cells, found["probes"])
    return section("Hostile, large and many requests", "probes", name, found["host"], words, table)


def _span(values: Iterable[float]) -> str:
    """The least and the greatest of some values."""
    found = sorted(values)
    ends = [f"{value:,.0f}" for value in (found[0], found[-1])]
    return " to ".join(dict.fromkeys(ends))


def _number(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens}"


def _outage_cell(where: str, service: str, fault: str, model: str = "bundled", mps: str = "off") -> str:
    cell = "faults: {times}; longest gap {gap_p50_ms:.0f} ms (p50), {gap_worst_ms:.0f} ms (worst); "
    for run in load(f"outages_{where}") or []:
        for row in run["outages"] if (run["plan"]["model"], run["plan"]["mps"]) == (model, mps) else ():
            if (row["service"], row["fault"]) == (service, fault):
                return f"{cell}back after {{back_p50_s:.1f}} s".format_map(row)
    return ""


def _swap_cell(where: str, before: str = "", after: str = "") -> str:
    """The cell of a swap; without names, of a killed draft's return."""
    found = load(f"swap_{where}") or {"swaps": []}
    if not before and found["swaps"]:
        tokens = found["return"]["tokens"]
        return "" if tokens is None else f"accept length at 95 % after {tokens} tokens of a stream"
    for row in found["swaps"]:
        if (row["before"], row["after"].partition(" ")[0]) == (before, after):
            lengths = f"{row['accept_length_before']:.2f} → {row['accept_length_after']:.2f}"
            undone = "taken off again by itself; " if row["rolled_back"] else ""
            return f"{undone}longest gap {row['gap_worst_ms']:.0f} ms, accept length {lengths}"
    return ""


def _soak_cell(where: str) -> str:
    if (found := load(f"soak_{where}")) is None:
        return ""
    num_growing = sum(row["is_slope"] for row in found["growths"])
    num_others = len(found["problems"]) - num_growing
    outcome = f"{num_others} problems" if num_others else "one end each, nothing left in use"
    if num_growing:
        outcome += f"; {num_growing} of {len(found['growths'])} quantities grow by more than their bounds"
    elif found["growths"]:
        outcome += ", no growth above a bound"
    return f"{sum(found['outcomes'].values()):,} jobs in {60 * found['plan']['minutes']:.0f} s: {outcome}"


def _probes_cell(where: str) -> str:
    if (found := load(f"probes_{where}")) is None:
        return ""
    held, health = (max(row[key] for row in found["probes"]) for key in ("stall_ms", "health_p99_ms"))
    return f"event loop held for {held:.0f} ms, health checks answered in {health:.0f} ms (p99), at most"


CELLS: dict[str, Callable[..., str]] = {
    "outages": _outage_cell,
    "swap": _swap_cell,
    "soak": _soak_cell,
    "probes": _probes_cell,
}
"""The text of a marked cell by the benchmark's name; empty if it was not measured."""
