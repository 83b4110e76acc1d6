"""Fills the marked figures and tables of README.md and docs/ from the results that are in the repository.

    python benchmarks/figures.py --write

`<!-- figure: FILE TEMPLATE -->…<!-- end -->` has a format of a result's fields, `<!-- figure: FILE WORDS -->` a cell of
CELLS, and `<!-- table: NAME WORDS -->` a table of TABLES. Without `--write` it prints the README's table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from slipstream.benchmarks import constrained
from slipstream.benchmarks.charts import PEER, peer_results, throughput
from slipstream.benchmarks.door import OPENAI, OURS
from slipstream.benchmarks.models import DRAFT_TITLES, EAGLE3, MODES, NONE, ONE, PLAIN, SHAPES, THREE
from slipstream.benchmarks.overlap import HOST_BLOCKS, RUN_AHEAD, lost_ms, title_of
from slipstream.benchmarks.peers import DRAFTING, DRAFTS, SHAPE_8B
from slipstream.benchmarks.peers import PLAIN as PLAIN_WAY
from slipstream.benchmarks.probes import PROBES, name_of
from slipstream.benchmarks.runner import Row, grouped, load, median_of, medians
from slipstream.common.host import STEP_LOOP

ROOT = Path(__file__).resolve().parent.parent
DOCS = ("measured", "measured-on-a-gpu", "capacity", "operations", "reliability", "openai")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in DOCS))
FORMATS = json.loads(Path(__file__).with_name("tables.json").read_text(encoding="utf-8"))
MARK = re.compile(r"(<!-- (figure|table): (\w+)([^\n]*?) -->)(.*?)(<!-- end -->)", re.DOTALL)
BATCHES = (1, 8, 32, 64)
README_WORKLOADS = {
    "chat": "chats, 64 at a time",
    "chat256": "chats, 256 at a time",
    "turns": "32 conversations",
}


def filled(page: str) -> str:
    """The page with every marked figure and table made anew from the results."""

    def make(match: re.Match[str]) -> str:
        begin, kind, name, words, _, end = match.groups()
        if kind == "table":
            return f"{begin}\n\n{TABLES[name](*words.split())}\n\n{end}"
        if "{" in words:
            return f"{begin}{words.strip().format_map(fields(name))}{end}"
        return f"{begin}{CELLS[name.rpartition('_')[0]](load(name), *words.split())}{end}"

    return MARK.sub(make, page)


def fields(name: str) -> Row:
    """The fields of a result, of the first row if it has rows, and what is derived from them."""
    found = load(name)
    rows = found if isinstance(found, list) else [found]
    row: Row = {f"num_{key}": len(value) for key, value in rows[0].items() if isinstance(value, list)} | rows[0]
    row["hosts"] = "; ".join(dict.fromkeys(row["host"] for row in rows if "host" in row))
    if "footprints" in row:
        row["growth"] = 100 * max(
            0.0, *(each["last_rss_kib"] / each["first_rss_kib"] - 1 for each in row["footprints"].values())
        )
    if "ways" in row:
        row["num_compared"] = num_compared(row)
    if "prices" in row:
        row["num_far"] = sum(not each["all_near_ties"] for each in row["rows"])
    if "undisturbed" in row:
        row["num_jobs"], row["num_errors"] = sum(run["jobs"] for run in rows), sum(len(run["errors"]) for run in rows)
    if "client_cpu_share" in row:
        row["client_cpu_share"] = max(each["client_cpu_share"] for each in rows)
    return row


def num_compared(lossless: Row) -> int:
    """Outputs but for those of the way that the others are compared with."""
    return int(lossless["num_outputs"] - lossless["num_cases"])


def markdown_table(header: str, rows: Iterable[str]) -> str:
    """A table; cells are separated by " | "."""
    return "\n".join((f"| {header} |", "|" + "---|" * len(header.split(" | ")), *(f"| {row} |" for row in rows)))


def table_of(name: str, rows: Iterable[Row]) -> str:
    """A table of rows; `tables.json` has its header, and the format of a row's cells."""
    header, cells = FORMATS[name]
    return markdown_table(header, map(cells.format_map, rows))


def _readme() -> str:
    """The README's table, with the hardware above it."""
    decode, kernels, on_cpu, lossless = map(load, ("decode_h200", "overlap_h200", "overlap_cpu", "lossless_cpu"))
    step = decode_medians(decode, SHAPE_8B)[-1]
    speeds = {r["way"]: r["tokens_per_second"] for r in load("peers_h200") if r["case"] == SHAPE_8B}
    (*pair, steps), (*host_pair, ours, blocking) = (
        _of_longest(kernels, (RUN_AHEAD, 1, True, "timeline")),
        _of_longest(on_cpu, (RUN_AHEAD, 1, False, "host"), (HOST_BLOCKS, 0, False, "host")),
    )
    lost = " | ".join(f"{median(map(lost_ms, group)):.2f} ms" for group in (ours, blocking))
    num_different, num_outputs = lossless["num_different"], num_compared(lossless)
    gpu, cpu = (", ".join(found[0]["host"].split(", ")[:parts]) for found, parts in ((decode, 1), (on_cpu, 2)))
    rows = [
        "decode step, 8B shape, batch {batch}; baseline: one process | {step_ms:.2f} ms | {one_process_ms:.2f} ms | "
        "{ratio:.3f}".format_map(step),
        f"step, dummy kernels of {pair[0]:g} + {pair[1]:g} ms; baseline: their sum"
        f" | {median_of(steps, 'step_ms'):.2f} ms | {sum(pair):.2f} ms | {median_of(steps, 'ratio'):.3f}",
        f"one request, 8B shape, EAGLE-3 head; baseline: without a draft | {speeds[DRAFTING]:.0f} tokens/s"
        f" | {speeds[PLAIN_WAY]:.0f} tokens/s | {speeds[DRAFTING] / speeds[PLAIN_WAY]:.2f}",
        *_readme_workloads(),
        f"lost per step on a CPU, dummy kernels of {host_pair[0]:g} + {host_pair[1]:g} ms; baseline: the host blocks"
        f" | {lost} | {median_of(ours, 'lost_share'):.3f}",
        "outputs on a CPU that differ from plain decoding's; baseline: all that were compared"
        f" | {num_different} | {num_outputs:,} | {num_different / num_outputs:g}",
    ]
    header = "workload | Slipstream | baseline | ratio"
    return f"{gpu}; on a CPU: {cpu}.\n\n{markdown_table(header, rows)}"


def _of_longest(rows: Sequence[Row], *orders: tuple[Any, ...]) -> tuple[Any, ...]:
    """The lengths of the longest dummy kernels, and the rows of some orders with them."""
    pair = max((row["draft_ms"], row["verify_ms"]) for row in rows)
    groups = grouped(rows, "draft_ms", "verify_ms", "policy", "run_ahead", "mps", "fence")
    return *pair, *(groups[*pair, *order] for order in orders)


def _readme_workloads() -> Iterable[str]:
    peer = peer_results(SHAPE_8B)
    groups = grouped(load("load_h200"), "model", "draft", "workload")
    for workload, words in README_WORKLOADS.items():
        (ours,), theirs = groups[SHAPE_8B, EAGLE3, workload], peer[EAGLE3, workload]
        own, other = ours["tokens_per_second"], theirs["tokens_per_second"]
        title = f"{words}, 8B shape, EAGLE-3 head; baseline: {PEER}"
        yield f"{title} | {own:,.0f} tokens/s | {other:,.0f} tokens/s | {own / other:.2f}"


def _overlap(name: str) -> str:
    found = load(name)
    is_gpu = found[0]["device"] == "cuda"
    columns = sorted(grouped(found, "draft_ms", "verify_ms", "mps"), reverse=True)
    header = "order of steps" + "".join(
        f" | {draft_ms:g} + {verify_ms:g} ms{', no MPS' if is_gpu and not mps else ''} | lost share"
        for draft_ms, verify_ms, mps in columns
    )
    rows = []
    for (title,), mine in grouped([row | {"title": title_of(row)} for row in found], "title").items():
        found = medians(mine, ("draft_ms", "verify_ms", "mps"), ("ratio", "lost_share"))
        cells = {tuple(row.values())[:3]: "{ratio:.3f} | {lost_share:.3f}".format_map(row) for row in found}
        rows.append(" | ".join((title, *(cells.get(column, " | ") for column in columns))))
    return markdown_table(header, rows)


def decode_medians(found: Iterable[Row], shape: str) -> list[Row]:
    """Medians of a shape's batches that both modes ran, in three processes; a figure that is not known is ""."""
    rows = []
    groups = grouped([row for row in found if row["shape"] == shape], "batch", "mode")
    for batch in [batch for batch, mode in groups if mode == ONE]:
        three, one = (groups[batch, mode] for mode in MODES)
        row = {"batch": batch, "repeats": len(three), "one_process_ms": median_of(one, "step_ms")}
        for name in ("tokens_per_second", "step_ms", "draft_ms", "verify_ms", "bubble_ms"):
            row[name] = median_of(three, name)
        row["ratio"] = row["step_ms"] / row["one_process_ms"]
        row["overlap_efficiency"] = median(1 - m["bubble_ms"] / m["step_ms"] for m in three)
        for role in ("verify", "draft"):
            known = [m for m in three if m[f"{role}_floor_ms"] is not None]
            row[f"{role}_over_floor"] = _median(m[f"{role}_ms"] / m[f"{role}_floor_ms"] for m in known)
        for name, key in (("loop", STEP_LOOP), *((name, name) for name in ("scheduler", "draft", "verify"))):
            row[f"cpu_{name}"] = _median(m["cpu_ms"][key] for m in three if key in m["cpu_ms"])
        rows.append(row)
    return rows


def _median(values: Iterable[float]) -> str:
    found = list(values)
    return f"{median(found):.2f}" if found else ""


def _decode(shape: str) -> str:
    found = decode_medians(load("decode_h200"), shape)
    repeats = f"Repeats of each mode, in turns: {found[0]['repeats']}."
    return f"{repeats}\n\n{table_of('decode', found)}\n\n{table_of('decode ratios', found)}"


def _constrained() -> str:
    """Steps of requests with a JSON schema, beside steps without."""
    measured = load("constrained_h200")
    of_free = {(row["batch"], row["mode"]): f"{row['ratio']:.3f}" for row in constrained.ratios(measured)}
    titles = {constrained.FREE: "none", constrained.ALL: "all", constrained.SOME: str(constrained.NUM_MIXED)}
    rows = []
    for (batch, mode), found in grouped(measured, "batch", "mode").items():
        step_ms, ratio = _median(row["step_ms"] for row in found), of_free.get((batch, mode), "")
        times = [f"{median_of(found, name):.3f}" if ratio else "" for name in ("mask_ms", "wait_ms")]
        length = _median(row["mean_accept_length"] for row in found)
        rows.append(" | ".join((str(batch), titles[mode], str(len(found)), step_ms, ratio, *times, length)))
    header = "at once | with a schema | repeats | step, ms | / none | masks, ms | wait for them, ms | accept length"
    return markdown_table(header, rows)


def _experts() -> str:
    """Steps of mixtures of experts, with an EAGLE-3 head and without."""
    keys, names = ("shape", "mode", "batch"), ("tokens_per_second", "step_ms", "draft_ms", "verify_ms", "over_floor")
    measured = [
        row | {"over_floor": row["verify_ms"] / row["verify_floor_ms"]}
        for name in ("decode_h200", "experts_h200")
        for row in load(name)
        if SHAPES.get(row["shape"], {}).keys() & {"num_experts", "num_local_experts"}
    ]
    rows = sorted(medians(measured, keys, names), key=itemgetter(*keys))
    return table_of(
        "experts", (row | {"draft": DRAFT_TITLES[NONE if row["mode"] == PLAIN else EAGLE3]} for row in rows)
    )


def _chosen() -> str:
    """Medians of steps whose draft tokens are chosen, and of those with a fixed number."""
    names = ("tokens_per_second", "mean_accept_length", "step_ms")
    rows = medians(load("draft_choice_h200"), ("batch", "fixed_draft_tokens"), names)
    rows = [row | {"draft_tokens": row["fixed_draft_tokens"] or "auto"} for row in rows]
    return table_of("chosen", sorted(rows, key=itemgetter("batch")))


def _door() -> str:
    """Medians of OpenAI's interface and of our own, measured in turns."""
    names, rows = ("late_p50_ms", "late_p99_ms", "first_token_p50_ms", "gateway_us", "door_us", "messages"), []
    for (batch,), found in grouped(medians(load("door_cpu"), ("batch", "interface"), names), "batch").items():
        ours, openai = (next(row for row in found if row["interface"] == interface) for interface in (OURS, OPENAI))
        ratio = openai["messages"] / ours["messages"]
        rows.append({"batch": batch, "ours": ours, "openai": openai, "ratio": ratio})
    return table_of("door", rows)


def _fp8() -> str:
    return table_of("fp8", _beside_bfloat16("plain_h200", ("fp8",)))


def _packed() -> str:
    return table_of("packed", _beside_bfloat16("packed_h200", ("fp8", "w4")))


def _beside_bfloat16(name: str, kinds: tuple[str, ...]) -> list[dict[str, float]]:
    """Steps of each batch with weights in bfloat16, and of some kinds: `KIND_ms`, and `KIND_speedup`."""
    steps = {key: median_of(rows, "step_ms") for key, rows in grouped(load(name), "batch", "shape").items()}
    rows = []
    for (batch, shape), ms in steps.items():
        others = {kind: steps.get((batch, f"{shape}-{kind}"), 0.0) for kind in kinds}
        if all(others.values()):
            row = {"batch": batch, "ms": ms} | {f"{kind}_ms": other for kind, other in others.items()}
            rows.append(row | {f"{kind}_speedup": ms / other for kind, other in others.items()})
    return rows


WORKLOAD = ("workload", "temperature", "max_new_tokens")
DRAFT = ("algorithm", "num_draft_tokens")


def _accept_length() -> str:
    rows = []
    for group in grouped(load("accept_length_cpu"), *DRAFT, *WORKLOAD).values():
        lengths = sorted(row["mean_accept_length"] for row in group)
        row = group[0] | {"title": DRAFT_TITLES[group[0]["algorithm"]], "num_seeds": len(group)}
        row["spread"] = " to ".join(f"{length:.2f}" for length in (lengths[0], lengths[-1])[: len(group)])
        rows.append(row | {"repeated": 100 * max(row["repeated_share"] for row in group)})
    return table_of("accept_length", rows)


def _drafters() -> str:
    """Every drafter with the bundled target on a GPU."""
    found = load("accept_length_h200")
    columns = list(grouped(found, *WORKLOAD))
    header = "draft | K" + "".join(f" | {workload}, T = {t:g}, {n} tokens | tokens/s" for workload, t, n in columns)
    rows = []
    for (draft, count), mine in grouped(found, *DRAFT).items():
        cells = {
            key: "{mean_accept_length:.2f} | {tokens_per_second:,.0f}".format_map(row)
            for key, (row,) in grouped(mine, *WORKLOAD).items()
        }
        rows.append(" | ".join((DRAFT_TITLES[draft], str(count), *(cells.get(column, " | ") for column in columns))))
    return markdown_table(header, rows)


def _by_position() -> str:
    """The share of steps in which a draft token is accepted, by its position."""
    found = [row for row in load("accept_length_cpu") if row["workload"] == "held-out" and row["temperature"]]
    groups = grouped([row for row in found if "accepted_per_position" in row], *DRAFT)
    most, lines = max(count for _, count in groups), []
    for (algorithm, num_draft_tokens), rows in groups.items():
        steps = sum(row["num_verify_steps"] for row in rows)
        counts = map(sum, zip(*(row["accepted_per_position"] for row in rows), strict=True))
        shares = [f"{count / steps:.2f}" for count in counts] + [""] * (most - num_draft_tokens)
        lines.append(" | ".join((DRAFT_TITLES[algorithm], str(num_draft_tokens), *shares)))
    return markdown_table(" | ".join(["draft", "K", *map(str, range(1, most + 1))]), lines)


def _drafter_steps() -> str:
    """Step times of the 8B shape by drafter."""
    groups = grouped([row for name in ("plain_h200", "decode_h200") for row in load(name)], "mode", "shape")
    rows = []
    for draft in (NONE, "standalone", EAGLE3, "eagle", "mtp", "ngram"):
        shape = SHAPE_8B if draft in (NONE, EAGLE3) else f"{SHAPE_8B}-{draft}"
        found = groups[PLAIN if draft == NONE else THREE, shape]
        times = [_median(row["step_ms"] for row in found if row["batch"] == batch) for batch in BATCHES]
        rows.append(" | ".join((DRAFT_TITLES[draft], str(len(grouped(found, "repeat"))), *times)))
    return markdown_table("draft | repeats" + "".join(f" | batch {batch}" for batch in BATCHES), rows)


def _load(name: str, model: str) -> str:
    """Throughput and latencies by workload, those of the peer in parentheses."""
    header = (
        "workload | draft | tokens/s | first token p50, ms | p99 | per token p50, ms | p99 | message gap, ms | cached"
    )
    times = ("first_token_p50_ms", "first_token_p99_ms", "per_token_p50_ms", "per_token_p99_ms", "message_gap_p50_ms")
    rows, peer = [], peer_results(model)
    for ours in (row for row in load(name) if row["model"] == model):
        theirs = peer.get((ours["draft"], ours["workload"]), {"workload": ours["workload"]})
        cells = [_cell(throughput(ours), throughput(theirs), 0)]
        cells += [_cell(ours[time], theirs.get(time), 1) for time in times]
        cached = f"{100 * ours['cached_share']:.0f} %"
        rows.append(" | ".join((ours["workload"], DRAFT_TITLES[ours["draft"]], *cells, cached)))
    return markdown_table(header, rows)


def _cell(ours: float | None, theirs: float | None, digits: int) -> str:
    found = [f"{value:,.{digits}f}" for value in (ours, theirs) if value is not None]
    return found[0] if len(found) == 1 else f"{found[0]} ({found[1]})"


SOURCES = {
    "capacity": ("capacity_h200", None),
    "delivery": ("", None),
    "draft_choice": ("draft_choice", None),
    "peers": ("peers_h200", None),
    "near_ties": ("near_ties_h200", "rows"),
    "prices": ("near_ties_h200", "prices"),
    "serving": ("serving_cpu", "runs"),
    "long_prompt": ("long_prompt_cpu", "results"),
    "swaps": ("", "swaps"),
    "growths": ("soak_cpu", "growths"),
    "probes": ("probes_cpu", "probes"),
    "kv_numbers": ("kv_numbers_cpu", None),
    "forced_spans": ("forced_spans_cpu", None),
    "blocks": ("decode_dflash_h200", None),
}
"""Tables whose rows are those of a result: its file, unless the page names it, and the part that has the rows."""
LOADS = {name_of(probe): (probe.__doc__ or "").rstrip(".") for probe in PROBES}


def _rows(table: str, name: str = "") -> str:
    file, part = SOURCES[table]
    rows = load(name or file) if part is None else load(name or file)[part]
    return table_of(table, (row | _derived(row, rows) for row in rows if not is_reference(row)))


def is_reference(row: Row) -> bool:
    """True for the outputs that those of the other ways are compared with."""
    return "largest_gap" in row and (row["draft"], row["at_once"]) == (NONE, 1)


def _derived(row: Row, rows: Sequence[Row]) -> Row:
    """Fields of a table that are made from those of a row."""
    more: Row = {"title": DRAFT_TITLES.get(str(row.get("algorithm", row.get("draft"))))}
    if "cpu_ms" in row:
        gateways = (ms for process, ms in row["cpu_ms"].items() if process.startswith("gateway"))
        more |= {"loop": row["cpu_ms"][STEP_LOOP], "cpu_of_gateways": sum(gateways)}
    elif "tried" in row:
        cells = "{rate:.1f} | {tokens_per_second:,.0f} | {first_token_p99_ms:.0f} | {per_token_p99_ms:.1f}"
        found = (cells.format_map(one) for one in row["tried"] if one["rate"] == row["rate"])
        more["best"] = next(found, "0 |  |  | ")
    elif "way" in row:
        first = next(one for one in rows if one["case"] == row["case"])
        more["faster"] = first["tokens_per_second"] / row["tokens_per_second"]
        more["draft"] = DRAFTS.get((row["case"], row["way"]), "none")
    elif "largest_gap" in row:
        more["is_deterministic"] = "yes" if row["deterministic"] else "no"
        more["gap"] = "" if row["largest_gap"] is None else f"{row['largest_gap']:.3f}"
    elif "step_us" in row:
        more |= {f"{name}_ms": row[f"{name}_us"] / 1000 for name in ("step", "deterministic_step")}
    elif "first_token_s" in row:
        more["median_s"] = median(row["first_token_s"])
    elif "rolled_back" in row:
        more["undone"] = " (taken off again)" if row["rolled_back"] else ""
        more["tokens"] = "–" if row["recovery_tokens"] is None else row["recovery_tokens"]
    elif "quantity" in row:
        more["in_use"] = row["quantity"].replace("_mib", ", MiB")
    elif "codes" in row:
        more["load"], answers = LOADS[row["name"]], (f"{count:,} {code}" for code, count in row["codes"].items())
        more["answers"] = ", ".join(answers)
    return more


def _outages(name: str, model: str, mps: str) -> str:
    """What the undisturbed run was, and a row for each fault."""
    mine = [run for run in load(name) if (run["plan"]["model"], run["plan"]["mps"]) == (model, mps)]
    spans = {key: _span(run["undisturbed"][key] for run in mine) for key in mine[0]["undisturbed"]}
    spans["watchdog_ms"] = _span(run["watchdog_ms"] for run in mine)
    setup = (
        "Undisturbed {tokens_per_second} tokens/s and {step_ms} ms a step, which waits for the draft {watchdog_ms} ms"
    )
    calm = "none |  |  | {gap_p50_ms} | {gap_worst_ms} |  |  | ".format_map(spans)
    header, cells = FORMATS["outages"]
    table = markdown_table(header, [calm, *(cells.format_map(row) for run in mine for row in run["outages"])])
    return f"{setup.format_map(spans)} at most.\n\n{table}"


def _span(values: Iterable[float]) -> str:
    """The least and the greatest value."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:,.0f}" for value in (found[0], found[-1])))


TABLES: dict[str, Callable[..., str]] = {
    **{name: partial(_rows, name) for name in SOURCES},
    **{
        make.__name__.removeprefix("_"): make
        for make in (
            _readme,
            _overlap,
            _door,
            _decode,
            _constrained,
            _experts,
            _chosen,
            _fp8,
            _packed,
            _accept_length,
            _drafters,
            _by_position,
            _drafter_steps,
            _load,
            _outages,
        )
    },
}
"""Makes a marked table from the words after its name."""


def _cell_of(rows: Iterable[Row], cell: str, **wanted: object) -> str:
    """A cell of the only row with these values."""
    (row,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return cell.format_map(row)


def _outage_cell(runs: Sequence[Row], service: str, fault: str, model: str = "bundled", mps: str = "off") -> str:
    cell = "faults: {times}; longest gap {gap_p50_ms:.0f} ms (p50), {gap_worst_ms:.0f} ms (worst); back after "
    rows = (row for run in runs if (run["plan"]["model"], run["plan"]["mps"]) == (model, mps) for row in run["outages"])
    return _cell_of(rows, f"{cell}{{back_p50_s:.1f}} s", service=service, fault=fault)


def _swap_cell(found: Row, before: str = "", after: str = "") -> str:
    """A swap; without names, the return of a killed draft."""
    if not before:
        return f"accept length at 95 % after {found['return']['tokens']} tokens of a stream"
    cell = "longest gap {gap_worst_ms:.0f} ms, accept length {accept_length_before:.2f} → {accept_length_after:.2f}"
    undone = {False: "", True: "taken off again by itself; "}
    rows = (row | {"undone": undone[row["rolled_back"]]} for row in found["swaps"])
    return _cell_of(rows, "{undone}" + cell, before=before, after=after)


def _soak_cell(found: Row) -> str:
    num_growing = sum(row["is_slope"] for row in found["growths"])
    num_others = len(found["problems"]) - num_growing
    outcome = f"{num_others} problems" if num_others else "one end each, nothing left in use"
    if num_growing:
        outcome += f"; {num_growing} of {len(found['growths'])} quantities grow by more than their bounds"
    elif found["growths"]:
        outcome += ", no growth above a bound"
    return f"{sum(found['outcomes'].values()):,} jobs in {60 * found['plan']['minutes']:.0f} s: {outcome}"


def _probes_cell(found: Row) -> str:
    held, health = (max(row[key] for row in found["probes"]) for key in ("stall_ms", "health_p99_ms"))
    return f"event loop held for {held:.0f} ms, health checks answered in {health:.0f} ms (p99), at most"


def _cold_start_cell(rows: Sequence[Row], start: str) -> str:
    return _cell_of(rows, "{served_s:.0f} s, and with the draft after {drafted_s:.0f} s", start=start)


CELLS: dict[str, Callable[..., str]] = {
    "cold_start": _cold_start_cell,
    "outages": _outage_cell,
    "swap": _swap_cell,
    "soak": _soak_cell,
    "probes": _probes_cell,
}
"""Makes a marked figure from a benchmark's result and the words after its file."""


def main(write: Annotated[bool, typer.Option(help="Write them into README.md and docs/.")] = False) -> None:
    """Prints the README's table, or fills the pages."""
    if not write:
        print(_readme())
        return
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
