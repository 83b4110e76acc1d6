"""Sections of the pages of figures, from the results that are in the repository."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks import overlap
from slipstream.benchmarks.decode import MODES, ONE, PLAIN, THREE
from slipstream.benchmarks.models import DRAFT_TITLES, EAGLE3, EAGLE3_AUTO, NONE
from slipstream.benchmarks.peers import DRAFTS
from slipstream.benchmarks.runner import read_json
from slipstream.common.host import STEP_LOOP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from slipstream.benchmarks.runner import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LINE = 120
WRITTEN = "Written by `python benchmarks/figures.py --write` from the files that each section names."
SHAPE = "llama-3.1-8b"
BATCHES = (1, 8, 32, 64)
PROMPT_WORKLOADS = ("prefill", "ctx8k")
"""Their throughput is that of all tokens; of the others, that of the output."""
PEER = "vLLM 0.22.0"
PEER_RESULTS = "load_vllm_h200"
CAPACITY = "capacity_h200"
README_WORKLOADS = {
    "chat": "chats, 64 at a time",
    "chat256": "chats, 256 at a time",
    "turns": "32 conversations",
}
"""Workloads of the README's table."""
LOAD_DRAFTS = {EAGLE3: "EAGLE-3", EAGLE3_AUTO: "EAGLE-3, auto", NONE: "none"}


def load(name: str) -> Any:
    """Reads a result file; None without it."""
    return read_json(RESULTS / f"{name}.json")


def section(title: str, script: str, result: str, where: str, words: str, *more: str) -> list[str]:
    """The paragraphs of a section: a heading, links to script and results with the machine, words, and the rest."""
    links = f"[`{script}.py`](../benchmarks/{script}.py), [JSON](../benchmarks/results/{result}.json)"
    return [f"## {title}", text(f"{links}{where and '; '}{where}."), text(words), *more]


def text(paragraph: str) -> str:
    """The paragraph in lines."""
    return fill(paragraph, LINE, break_long_words=False, break_on_hyphens=False)


def markdown_table(header: str, rows: Iterable[str]) -> str:
    """A table; cells are separated by " | "."""
    lines = [f"| {row} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header.split(" | ")), *lines[1:]])


def table_of(header: str, cells: str, rows: Iterable[Row]) -> str:
    """A table of rows. `cells`: the format of a row's cells."""
    return markdown_table(header, map(cells.format_map, rows))


def median_of(rows: Iterable[Row], name: str) -> float:
    """The median of a figure."""
    return float(median(row[name] for row in rows))


def pairs_of(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """The lengths of dummy kernels in results of overlap, the longest first."""
    return sorted({(row["draft_ms"], row["verify_ms"]) for row in rows}, reverse=True)


def overlap_section(name: str) -> list[str]:
    """Steps over their dummy kernels."""
    found = load(name)
    is_gpu = found[0]["device"] == "cuda"
    columns = [(pair, mps) for pair in pairs_of(found) for mps in sorted({row["mps"] for row in found})[::-1]]
    header = "order of steps" + "".join(
        f" | {draft_ms:g} + {verify_ms:g} ms{', no MPS' if is_gpu and not mps else ''} | lost share"
        for (draft_ms, verify_ms), mps in columns
    )
    cells: dict[str, dict[Any, list[Row]]] = {}
    for row in found:
        column = (row["draft_ms"], row["verify_ms"]), row["mps"]
        cells.setdefault(overlap.title_of(row), {}).setdefault(column, []).append(row)
    rows = [
        title
        + "".join(
            f" | {median_of(mine[column], 'ratio'):.3f} | {median_of(mine[column], 'lost_share'):.3f}"
            if column in mine
            else " |  | "
            for column in columns
        )
        for title, mine in cells.items()
    ]
    words = (
        f"Dummy kernels of a known length, {found[0]['num_clients']} streaming clients, metrics on: the time of a "
        "step over the length of its kernels, and the part that it loses (step - busy) as a share of that of host "
        "blocks in the same repeat; medians. With host blocks, workers acknowledge work that is done, and each command "
        "waits for the acknowledgements that it needs."
    )
    if is_gpu:
        words += " Timeline fences and workers under MPS, unless a row or column says something else."
    return section("A step over its kernels", "overlap", name, found[0]["host"], words, markdown_table(header, rows))


def decode_medians(found: Sequence[Row]) -> list[Row]:
    """Medians of each shape and batch that both modes ran, in three processes; a figure that is not known is ""."""
    rows = []
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in found if row["mode"] == ONE):
        three, one = (
            [m for m in found if (m["shape"], m["batch"], m["mode"]) == (shape, batch, mode)] for mode in MODES
        )
        names = ("tokens_per_second", "step_ms", "draft_ms", "verify_ms", "bubble_ms")
        row = {"shape": shape, "batch": batch, "repeats": len(three), "one_process_ms": median_of(one, "step_ms")}
        row |= {name: median_of(three, name) for name in names}
        row["ratio"] = row["step_ms"] / row["one_process_ms"]
        row["overlap_efficiency"] = median(1 - m["bubble_ms"] / m["step_ms"] for m in three)
        for role in ("verify", "draft"):
            known = [m for m in three if m[f"{role}_floor_ms"] is not None]
            row[f"{role}_over_floor"] = _median_or_none(m[f"{role}_ms"] / m[f"{role}_floor_ms"] for m in known)
        for name in ("loop", "scheduler", "draft", "verify"):
            key = STEP_LOOP if name == "loop" else name
            row[f"cpu_{name}"] = _median_or_none(m["cpu_ms"][key] for m in three if key in m["cpu_ms"])
        rows.append(row)
    return rows


def _median_or_none(values: Iterable[float]) -> str:
    found = list(values)
    return f"{median(found):.2f}" if found else ""


def decode_section() -> list[str]:
    """Decode steps of each shape."""
    measured = load("decode_h200")
    words = (
        "Random weights, an EAGLE-3 head (*-mtp*: modules for multi-token prediction) with K = 4, a simulated accept "
        "length of 3.5, contexts that grow from 1,024 tokens to 1,400; medians. *Floor* is the time to read the step's "
        "bytes at the bandwidth of a copy. CPU time is that of each process, and of the *loop*, the thread of the "
        "scheduler that decides the steps. Draft and verify are processes of their own under MPS; *one process* is all "
        "of it in one, on one stream. Shapes that the last run left out are of an earlier one."
    )
    times = (
        "batch | tokens/s | step, ms | draft, ms | verify, ms | bubble, ms | "
        "CPU, ms: loop | scheduler | draft | verify",
        "{batch} | {tokens_per_second:,.0f} | {step_ms:.3f} | {draft_ms:.3f} | {verify_ms:.3f} | {bubble_ms:.3f} | "
        "{cpu_loop} | {cpu_scheduler} | {cpu_draft} | {cpu_verify}",
    )
    ratios = (
        "batch | overlap efficiency | step / one process | verify / floor | draft / floor",
        "{batch} | {overlap_efficiency:.4f} | {ratio:.4f} | {verify_over_floor} | {draft_over_floor}",
    )
    parts = section("Decode steps", "decode", "decode_h200", measured[0]["host"], words)
    found = decode_medians(measured)
    for shape in dict.fromkeys(row["shape"] for row in found):
        mine = [row for row in found if row["shape"] == shape]
        repeats = f"Repeats of each mode, in turns: {mine[0]['repeats']}."
        parts += [f"### {shape}", repeats, table_of(*times, mine), table_of(*ratios, mine)]
    return parts


def fp8_section() -> list[str]:
    """Decode steps with weights in FP8."""
    found = load("plain_h200")
    keys = dict.fromkeys((row["shape"], row["batch"]) for row in found)
    steps = {key: median_of((m for m in found if (m["shape"], m["batch"]) == key), "step_ms") for key in keys}
    rows = [
        f"{batch} | {ms:.3f} | {steps[f'{shape}-fp8', batch]:.3f} | {ms / steps[f'{shape}-fp8', batch]:.2f}"
        for (shape, batch), ms in steps.items()
        if (f"{shape}-fp8", batch) in steps
    ]
    words = (
        "Decode steps without a draft of the shape of Llama-3.1-8B, weights in bfloat16 and in FP8 (blocks of 128 x "
        "128), in turns; medians. FP8 halves the memory of the weights."
    )
    table = markdown_table("batch | bfloat16: step, ms | FP8: step, ms | speedup", rows)
    return section("FP8 weights", "decode", "plain_h200", found[0]["host"], words, table)


def accept_length_section() -> list[str]:
    """The bundled drafts' and prompt lookup's accept lengths on a CPU."""
    results = load("accept_length_cpu")
    names = ("algorithm", "num_draft_tokens", "workload", "temperature", "max_new_tokens")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for result in results:
        groups.setdefault(tuple(result[name] for name in names), []).append(result)
    rows = []
    for (draft, count, workload, temperature, tokens), group in groups.items():
        lengths = sorted(result["mean_accept_length"] for result in group)
        spread = " to ".join(f"{length:.2f}" for length in (lengths[0], lengths[-1])[: len(group)])
        repeated = f"{100 * max(result['repeated_share'] for result in group):.0f} %"
        about = f"{DRAFT_TITLES[draft]} | {count} | {workload} | {temperature:g} | {tokens}"
        rows.append(f"{about} | {len(group)} | {spread} | {repeated}")
    words = (
        f"The bundled drafts and prompt lookup (1 to 5 tokens), {results[0]['num_prompts']} held-out prompts, and "
        "edits: the same ones, a copy with another name, and the beginning of a further copy, with which the small "
        "target seldom goes on. Asked again, each edit is three requests with other names, one after the other. "
        "*And outputs*: with `--suffix-cache-tokens 65536`, which remembers the answers before. Small models repeat "
        "themselves, which makes drafting easy: the last column is the largest share of tokens in a repeated 5-gram."
    )
    table = markdown_table("draft | K | prompts | T | tokens | seeds | mean accept length | repeated", rows)
    return section("Accept length", "accept_length", "accept_length_cpu", "", words, table)


def every_drafter_section() -> list[str]:
    """Every drafter on a GPU: accept length and speed with the bundled target, and steps of the 8B shape."""
    results = load("accept_length_h200")
    cells = {
        (r["algorithm"], r["num_draft_tokens"], r["workload"], r["temperature"], r["max_new_tokens"]): (
            f"{r['mean_accept_length']:.2f} | {r['tokens_per_second']:,.0f}"
        )
        for r in results
    }
    columns = dict.fromkeys(key[2:] for key in cells)
    rows = [
        " | ".join(
            (DRAFT_TITLES[draft], str(count), *(cells.get((draft, count, *column), " | ") for column in columns))
        )
        for draft, count in dict.fromkeys(key[:2] for key in cells)
    ]
    header = "draft | K" + "".join(
        f" | {workload}, T = {temperature:g}, {tokens} tokens | tokens/s" for workload, temperature, tokens in columns
    )
    words = (
        f"The bundled target in bfloat16, {results[0]['num_prompts']} prompts of each workload, 8 requests at a time, "
        "one run of each: mean accept length, and output tokens divided by the time of all requests, prefill included, "
        "so outputs of 16 tokens say little of longer ones; nor does a target so small of larger ones. *Edits again* "
        "asks for three edits of each text; *n-grams, and outputs* looks in ended outputs, too. The workloads are "
        "those of [Accept length](measured.md#accept-length)."
    )
    return [
        *section("Every drafter", "accept_length", "accept_length_h200", results[0]["host"], words),
        markdown_table(header, rows),
        *_steps_of_shape(),
    ]


def _steps_of_shape() -> list[str]:
    """Words and a table: step times of the 8B shape by drafter, as far as they are measured."""
    measured = [row for name in ("plain_h200", "decode_h200") for row in load(name)]
    rows = []
    for draft in ("none", "standalone", "eagle3", "eagle", "mtp", "ngram"):
        key = (PLAIN if draft == "none" else THREE, SHAPE if draft in ("none", "eagle3") else f"{SHAPE}-{draft}")
        found = [row for row in measured if (row["mode"], row["shape"]) == key]
        times = [[row["step_ms"] for row in found if row["batch"] == batch] for batch in BATCHES]
        repeats = len({row["repeat"] for row in found}) or ""
        rows.append(f"{DRAFT_TITLES[draft]} | {repeats} | " + " | ".join(map(_median_or_none, times)))
    words = (
        "A decode step of the shape of Llama-3.1-8B in milliseconds, by requests at a time, K = 4; medians of "
        "[`decode.py`](../benchmarks/decode.py), from several runs: [JSON](../benchmarks/results/decode_h200.json), "
        "without a draft [JSON](../benchmarks/results/plain_h200.json). Weights are random, and every draft is "
        "accepted by chance, 3.5 tokens a step: compare what steps cost, not what drafts bring. The standalone draft "
        "has the shape of Llama-3.2-1B; an EAGLE head and MTP modules score all of the target's vocabulary, an EAGLE-3 "
        "head 32,000 tokens of it."
    )
    header = "draft | repeats" + "".join(f" | batch {batch}" for batch in BATCHES)
    return [text(words), markdown_table(header, rows)]


def peers_section() -> list[str]:
    """Single requests beside `transformers`."""
    results = load("peers_h200")
    first, fastest = results[0], {r["case"]: r["tokens_per_second"] for r in reversed(results)}
    for row in results:
        row["draft"] = DRAFTS.get((row["case"], row["way"]), "none")
        row["faster"] = fastest[row["case"]] / row["tokens_per_second"]
    words = (
        f"The same target, prompt ({first['prompt_tokens']} tokens) and length ({first['num_new_tokens']} tokens) on "
        f"both sides, {first['dtype']}, K = {first['num_draft_tokens']}; the drafts differ as the table says, because "
        "`transformers` has no EAGLE-3 head. The 8B shape has random weights. Draft and verify are processes of their "
        "own without MPS; one way is measured after the other."
    )
    header = f"target | way | draft | tokens/s | accept length | {first['way']} is faster by"
    cells = "{case} | {way} | {draft} | {tokens_per_second:,.0f} | {mean_accept_length:.2f} | {faster:.2f}"
    where = f"{first['hardware']}, {first['host']}"
    title = "One request, against `transformers`"
    return section(title, "peers", "peers_h200", where, words, table_of(header, cells, results))


def near_ties_section() -> list[str]:
    """Outputs that part in bfloat16, and the price of avoiding it."""
    report = load("near_ties_h200")
    for row in (*report["rows"], *report["prices"]):
        row["title"] = DRAFT_TITLES[row["draft"]]
    rows = [
        f"{'yes' if row['deterministic'] else 'no'} | {row['title']} | {row['at_once']} | {row['outputs']} | "
        f"{row['partings']} | {row['per_1000_tokens']:.2f} | "
        + ("" if row["largest_gap"] is None else f"{row['largest_gap']:.3f}")
        for row in report["rows"]
        if (row["draft"], row["at_once"]) != ("none", 1)
    ]
    prices = [
        f"{price['title']} | {price['at_once']} | {price['step_us'] / 1000:.2f} | "
        f"{price['deterministic_step_us'] / 1000:.2f} | {price['ratio']:.2f}"
        for price in report["prices"]
    ]
    num_far = sum(not row["all_near_ties"] for row in report["rows"])
    words = (
        "The bundled model against plain decoding of one request at a time. Products of other sizes round differently, "
        "and a token whose score is nearly the best may replace it. So each output is followed to where it first "
        f"parts, and the gap of the scores there compared with {report['bound']:g}: rows with a larger one: {num_far}."
    )
    return section(
        "Which outputs differ, in bfloat16",
        "near_ties",
        "near_ties_h200",
        report["host"],
        words,
        markdown_table("`--deterministic` | draft | at once | outputs | part | in 1,000 tokens | largest gap", rows),
        "The price of `--deterministic`, for a model so small that the host bounds many of these steps:",
        markdown_table("draft | at once | step, ms | deterministic, ms | ratio", prices),
    )


def num_compared(lossless: Row) -> int:
    """Outputs but for those of the way that the others are compared with."""
    return int(lossless["num_outputs"] - lossless["num_cases"])


def lossless_section() -> list[str]:
    """Outputs in every way of serving."""
    found = load("lossless_cpu")
    drafts = ", ".join(name for name in found["algorithms"] if name != "none")
    words = (
        f"{found['num_different']} of {num_compared(found):,} outputs differ from plain decoding's, one request at a "
        f"time: {found['num_cases']} requests ({found['num_prompts']} prompts, greedy and at T = 0.8, with "
        f"filters, penalties, bias and a least length), each in {found['num_ways'] - 1} ways: without a draft and with "
        f"{drafts}; alone and in batches of {max(found['concurrencies'])}; run-ahead {found['run_aheads'][0]} to "
        f"{found['run_aheads'][-1]}; prompts whole and in chunks of {min(found['chunk_tokens'])}; drafts off for every "
        "other request."
    )
    return section("The same tokens in every way", "lossless", "lossless_cpu", "", words)


def serving_section() -> list[str]:
    """Latency against load."""
    report = load("serving_cpu")
    header = "draft | requests/s | tokens/s | first token, ms | p99 | between tokens, ms | p99"
    cells = (
        "{title} | {offered_requests_per_second:.1f} | {report[tokens_per_second]:.0f} | "
        "{report[ttft_ms][p50]:.1f} | {report[ttft_ms][p99]:.1f} | "
        "{report[inter_token_ms][p50]:.1f} | {report[inter_token_ms][p99]:.1f}"
    )
    rows = [run | {"title": DRAFT_TITLES[run["algorithm"]]} for run in report["runs"]]
    capacity = ", ".join(
        f"{DRAFT_TITLES[name]} {found['tokens_per_second']:.0f}" for name, found in report["capacity"].items()
    )
    words = (
        f"Poisson arrivals, ShareGPT-like lengths times {report['lengths']['scale']:g}, T = {report['temperature']:g}. "
        f"Capacity by saturation, in tokens/s, by draft: {capacity}. Drafting spends compute to save time, and two "
        "busy cores have none to spare."
    )
    picture = "![Throughput and latency against offered load](../benchmarks/results/serving_cpu.png)"
    table = table_of(header, cells, rows)
    return section("Latency against load", "serving", "serving_cpu", report["host"], words, table, picture)


def overload_section() -> list[str]:
    """Ten times the capacity."""
    over = load("overload_cpu")
    plan, done, rejection = over["plan"], over["load"], over["load"]["rejection_ms"]
    growth = max(0.0, *(each["last_rss_kib"] / each["first_rss_kib"] - 1 for each in over["footprints"].values()))
    words = (
        f"{plan['factor']:g} times the capacity for {plan['seconds']:.0f} s, standalone draft: goodput "
        f"{over['goodput']:.2f} of the capacity; {done['num_rejected']} of {done['num_requests']} requests refused, "
        f"after {rejection['p50']:.1f} ms (p99 {rejection['p99']:.1f}, most {rejection['most']:.1f}), "
        f"{done['num_rejected'] - over['rejections_without_retry_info']} of them with a RetryInfo; health "
        f"{' and '.join(over['health_statuses'])} throughout; memory of the services grows by {100 * growth:.1f} % "
        "at most."
    )
    return section("Overload", "overload", "overload_cpu", over["host"], words)


def long_prompt_section() -> list[str]:
    """A stream beside a long prompt."""
    found = load("long_prompt_cpu")
    header = "tokens a step | alone, p50 | most | with the prompt, p50 | most | first token, s"
    cells = (
        "{max_batched_tokens} | {quiet_message_gap_ms[p50]:.0f} | {quiet_message_gap_ms[most]:.0f} | "
        "{message_gap_ms[p50]:.0f} | {message_gap_ms[most]:.0f} | {median_s:.2f}"
    )
    rows = [row | {"median_s": median(row["first_token_s"])} for row in found["results"]]
    words = (
        f"Milliseconds between messages of a running stream, alone and while a prompt of "
        f"{found['plan']['prompt_tokens']:,} tokens comes in, by `--max-batched-tokens`; and its own first token."
    )
    picture = "![A running stream while a long prompt comes in](../benchmarks/results/long_prompt_cpu.png)"
    title, table = "A long prompt beside a stream", table_of(header, cells, rows)
    return section(title, "long_prompt", "long_prompt_cpu", found["host"], words, table, picture)


def delivery_section() -> list[str]:
    """From a step to its clients."""
    header = "streams | gateways | journal | step, ms | to client p50, ms | p99, ms | loop | scheduler | gateways"
    cells = (
        "{batch} | {gateways} | {journal} | {step_ms:.2f} | {publish_to_client_p50_ms:.1f} | "
        "{publish_to_client_p99_ms:.1f} | {loop:.2f} | {cpu_ms[scheduler]:.2f} | {cpu_of_gateways:.1f}"
    )
    here, there = load("delivery_h200"), load("delivery_h200_other_host")
    for row in (*here, *there):
        row["loop"] = row["cpu_ms"][STEP_LOOP]
        row["cpu_of_gateways"] = sum(ms for name, ms in row["cpu_ms"].items() if name.startswith("gateway"))
    other = "The same on another machine of that kind ([JSON](../benchmarks/results/delivery_h200_other_host.json)):"
    words = (
        "Shape of Llama-3.1-8B with random weights, EAGLE-3 head, K = 4, accept length 3.5 by chance. Clients are "
        "processes of their own on the same host, a connection a stream. From when a step's result is on the host to "
        "a client's receipt of its tokens; CPU time a decode step of the thread that decides the steps, and of the "
        "processes."
    )
    more = table_of(header, cells, here), text(other), table_of(header, cells, there)
    return section("From a step to its clients", "delivery", "delivery_h200", here[0]["host"], words, *more)


def peer_results(model: str) -> dict[tuple[str, str], Row]:
    """What was measured of the peer, by draft and workload."""
    return {(row["draft"], row["workload"]): row for row in load(PEER_RESULTS)["results"] if row["model"] == model}


def throughput(row: Row) -> float | None:
    """The tokens per second that a row's workload is about; None if they were not measured."""
    return row.get("all_tokens_per_second" if row["workload"] in PROMPT_WORKLOADS else "tokens_per_second")


def load_rows() -> list[str]:
    """The README's rows of whole requests beside the peer's, as far as they were measured."""
    peer, rows = peer_results(SHAPE), []
    key = {"model": SHAPE, "draft": EAGLE3}
    ours = {r["workload"]: r["tokens_per_second"] for r in load("load_h200") or [] if key.items() <= r.items()}
    for workload, words in README_WORKLOADS.items():
        if (own := ours.get(workload)) is not None:
            theirs = peer[EAGLE3, workload]["tokens_per_second"]
            title = f"{words}, 8B shape, EAGLE-3 head; baseline: {PEER}"
            rows.append(f"{title} | {own:,.0f} tokens/s | {theirs:,.0f} tokens/s | {own / theirs:.2f}")
    return rows


def load_sections(name: str) -> list[str]:
    """For each model throughput and latencies by workload, beside the peer's."""
    results = load(name)
    if not results:
        return []
    hosts = "; ".join(dict.fromkeys(result["host"] for result in results))
    share = max(result["client_cpu_share"] for result in results)
    words = (
        "Whole requests through `slipstream up` and its Python client, greedy; `load.py` says what each workload is. "
        "Tokens/s are those of the output, and of prompts and output in "
        f"{' and '.join(PROMPT_WORKLOADS)}. Latencies count from the time at which a request had to be made; the time "
        "per token is a request's mean behind its first one; cached is the part of the prompts' tokens that was in the "
        "prefix cache. Rows that the last run left out are of an earlier one. The busiest client took "
        f"{share:.2f} of a core."
    )
    parts = section("Whole requests", "load", name, hosts, words)
    for model in dict.fromkeys(result["model"] for result in results):
        peer = peer_results(model)
        parts += [f"### {model}", _load_table([result for result in results if result["model"] == model], peer)]
        if peer:
            link = f"[JSON](../benchmarks/results/{PEER_RESULTS}.json)"
            parts.append(text(f"In parentheses: {PEER}, {link}. {load(PEER_RESULTS)['about']}"))
    return [*parts, f"![Throughput and latencies by workload](../benchmarks/results/{name}.png)"]


def _load_table(results: Iterable[Row], peer: Mapping[tuple[str, str], Row]) -> str:
    header = (
        "workload | draft | tokens/s | first token p50, ms | p99 | per token p50, ms | p99 | message gap, ms | cached"
    )
    times = ("first_token_p50_ms", "first_token_p99_ms", "per_token_p50_ms", "per_token_p99_ms", "message_gap_p50_ms")
    rows = []
    for ours in results:
        theirs = peer.get((ours["draft"], ours["workload"]), {"workload": ours["workload"]})
        cells = [_cell(throughput(ours), throughput(theirs), 0)]
        cells += [_cell(ours[name], theirs.get(name), 1) for name in times]
        cached = f"{100 * ours['cached_share']:.0f} %"
        rows.append(" | ".join((ours["workload"], LOAD_DRAFTS[ours["draft"]], *cells, cached)))
    return markdown_table(header, rows)


def _cell(ours: float | None, theirs: float | None, digits: int) -> str:
    found = [f"{value:,.{digits}f}" for value in (ours, theirs) if value is not None]
    return found[0] if len(found) == 1 else f"{found[0]} ({found[1]})"


def capacity_section() -> str:
    """The measured part of `docs/capacity.md`, from the results that there are."""
    results = load(CAPACITY)
    if not results:
        return "\n\n".join([text(WRITTEN), text("Nothing was measured yet.")])
    rows, limits = [], results[0]
    cells = "{rate:.1f} | {tokens_per_second:,.0f} | {first_token_p99_ms:.0f} | {per_token_p99_ms:.1f}"
    for result in results:
        best = next((cells.format_map(row) for row in result["tried"] if row["rate"] == result["rate"]), "0 |  |  | ")
        rows.append(f"{result['model']} | {LOAD_DRAFTS[result['draft']]} | {best}")
    header = "model | draft | requests/s | output tokens/s | first token p99, ms | per token p99, ms"
    words = (
        "The highest rate of requests at which the 99th percentiles of two latencies stay below their limits: "
        f"{limits['first_token_ms']:g} ms to the first token, from the time at which a request had to be made, and "
        f"{limits['per_token_ms']:g} ms per token, the mean of a request behind its first one. Requests come as a "
        "Poisson process with lengths of chats: about 200 tokens in and out, 2,000 and 1,000 at most. Weights are "
        "random; the EAGLE-3 head drafts 4 tokens, of which chance accepts so many that a step brings 3.5. "
        f"Each rate was tried once, for {limits['seconds']:g} s, the first quarter of which is left out, which is "
        "short: compare the rows, and measure your own server for longer."
    )
    links = f"[`load.py`](../benchmarks/load.py) `--capacity`, [JSON](../benchmarks/results/{CAPACITY}.json); "
    where = links + "; ".join(dict.fromkeys(result["host"] for result in results))
    picture = f"![Latencies by rate](../benchmarks/results/{CAPACITY}.png)"
    return "\n\n".join([text(WRITTEN), text(words), text(f"{where}."), markdown_table(header, rows), picture])
