"""The README's table of figures, and the page of a GPU's, from the results that are in the repository.

python benchmarks/figures.py            # prints both
python benchmarks/figures.py --write    # puts the one into README.md, between its two marks, and the other into docs/
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from slipstream.benchmarks.figures_gpu import decode_rows, overlap_rows, peers_rows
from slipstream.benchmarks.figures_page import page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
GPU_PAGE = ROOT / "docs" / "measured-on-a-gpu.md"
BEGIN = "<!-- figures: python benchmarks/figures.py --write -->"
END = "<!-- end of figures -->"

SERVING_FRACTION = 0.6
"""Of the capacity: the rate that the table shows."""
LONG_PROMPT_CHUNKS = (64, 512, 4096)
"""The sizes of chunks that the table shows; 512 is the default."""
ATTENTION = ((1, 8192), (32, 1024), (32, 8192))
"""Batch and context of what the table shows."""
STEP_CHECKS = ("step_check_cpu", "step_check_h200")
GPU_ROWS = {"overlap": overlap_rows, "decode": decode_rows, "peers": peers_rows}
DRAFTS = {"none": "no draft", "standalone": "standalone draft", "eagle3": "EAGLE-3 head"}


def table() -> str:
    """Markdown; every number comes from a file in `benchmarks/results`."""
    rows = [("what", "measured", "script and raw output")]
    rows += _overlap(_load("overlap_cpu"))
    rows += _accept_lengths(_load("accept_length_cpu"))
    rows.append(_lossless(_load("lossless_cpu")))
    soak = _load("soak_cpu")
    outcomes = soak["outcomes"]
    rows.append(
        (
            f"{soak['num_clients']} clients that come, go and cancel for {soak['seconds']:.0f} s",
            f"{sum(outcomes.values())} jobs, {outcomes['abort'] + outcomes['left']} of them cancelled; slots, pages, "
            f"threads and descriptors afterwards {'as before' if not soak['problems'] else 'not as before'}",
            _source("soak", "soak_cpu"),
        )
    )
    rows += [_serving(_load("serving_cpu")), _overload(_load("overload_cpu")), _long_prompt(_load("long_prompt_cpu"))]
    rows += [_step_check(name) for name in STEP_CHECKS if (RESULTS / f"{name}.json").is_file()]
    rows.append(_measuring(_load("metrics_cost_cpu")))
    rows.append(_attention(_load("attention_h200")))
    for script, rows_of in GPU_ROWS.items():
        if (RESULTS / f"{script}_h200.json").is_file():
            found = rows_of(_load(f"{script}_h200"))
            rows += [(what, measured, _source(script, f"{script}_h200")) for what, measured in found]
    if (RESULTS / "near_ties_h200.json").exists():
        rows.append(_near_ties(_load("near_ties_h200")))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---|---|---|", *lines[1:]])


def _step_check(name: str) -> tuple[str, str, str]:
    found = _load(name)
    parts = [_checked_part(part) for part in found["parts"] if part["delays"]]
    gpu = "" if found["device"] == "cpu" else f" on an {found['host'].partition(',')[0]}"
    what = (
        f"step metrics against the host's clock, and {found['delay_us']:g} us put at each edge in turn{gpu}: what "
        "shows there, and the most that shows at another"
    )
    return what, "; ".join(parts), _source("step_check", name)


def _checked_part(part: dict[str, Any]) -> str:
    clock = part["clocks"][0]
    said = (
        f"{part['name']}: sum over {clock['num_steps']:,} steps {clock['step_s'] / clock['clock_s']:.5f} of the clock's"
    )
    for run_ahead, where in ((1, "between streams"), (0, "a host that sends late, run-ahead 0")):
        checks = [check for check in part["delays"] if check["delay"]["run_ahead"] == run_ahead]
        own = [check["median"]["bubble_us"][check["delay"]["edge"]] for check in checks]
        others = [
            abs(grown)
            for check in checks
            for edge, grown in check["median"]["bubble_us"].items()
            if edge != check["delay"]["edge"]
        ]
        if checks:
            said += f", {where} {min(own):.0f} to {max(own):.0f} us and {max(others):.0f}"
    return said


def _measuring(cost: dict[str, Any]) -> tuple[str, str, str]:
    share = f"{100 * cost['low_us'] / 1000:.1f} to {100 * cost['high_us'] / 1000:.1f} %"
    return (
        f"what measuring adds to a step of {cost['step_us'] / 1000:.1f} ms, with and without it in turns, "
        f"{len(cost['pairs'])} pairs",
        f"{cost['median_us']:.1f} us (95 of 100 resamples: {cost['low_us']:.1f} to {cost['high_us']:.1f}), which is "
        f"{share} of a millisecond",
        _source("metrics_cost", "metrics_cost_cpu"),
    )


def _attention(result: dict[str, Any]) -> tuple[str, str, str]:
    places = {(m["batch"], m["context"]): m for m in result["measurements"]}
    parts = []
    for batch, context in ATTENTION:
        m = places[batch, context]
        times = m["torch_us"] / m["kernel_us"]
        parts.append(
            f"batch {batch}, context {context}: {100 * m['share_of_bandwidth']:.0f} % of the copy bandwidth, "
            f"PyTorch's takes {times:.1f} times as long"
        )
    gpu = result["host"].partition(",")[0]
    what = f"attention over pages on an {gpu}, 8B shape, {result['width']} query tokens, bfloat16"
    return what, "; ".join(parts), _source("attention", "attention_h200")


def _near_ties(report: dict[str, Any]) -> tuple[str, str, str]:
    usual = [
        row for row in report["rows"] if not row["deterministic"] and (row["draft"], row["at_once"]) != ("none", 1)
    ]
    never = [row for row in report["rows"] if row["deterministic"] and (row["draft"], row["at_once"]) != ("none", 1)]
    rates = [row["per_1000_tokens"] for row in usual]
    largest = max((row["largest_gap"] for row in usual if row["largest_gap"] is not None), default=0.0)
    num_far = sum(not row["all_near_ties"] for row in usual)
    prices = [price["ratio"] for price in report["prices"]]
    gpu = report["host"].partition(",")[0]
    what = (
        f"outputs in {report['dtype']} against plain decoding alone, bundled model on an {gpu}: "
        f"{report['num_prompts']} prompts, greedy and at T = 0.8, without a draft and with the bundled ones, alone and "
        f"in batches of {max(row['at_once'] for row in usual)}"
    )
    result = (
        f"{sum(row['partings'] for row in usual)} of {sum(row['outputs'] for row in usual)} outputs part, "
        f"{min(rates):.2f} to {max(rates):.2f} times in 1,000 tokens, "
        f"{'each' if not num_far else 'not each'} at a near tie (at most {largest:.2f} from the best score, bound "
        f"{report['bound']:g}); with `--deterministic` {sum(row['partings'] for row in never)} of "
        f"{sum(row['outputs'] for row in never)}, and a step takes {min(prices):.2f} to {max(prices):.2f} times as long"
    )
    return what, result, _source("near_ties", "near_ties_h200")


def _overlap(measurements: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for pair in sorted({(m["draft_ms"], m["verify_ms"]) for m in measurements}, reverse=True):
        group = [m for m in measurements if (m["draft_ms"], m["verify_ms"]) == pair]
        parts = []
        for policy, run_ahead, name in (
            ("run_ahead", 1, "run-ahead 1"),
            ("host_blocks", 0, "host blocks on each call"),
        ):
            ratios = [m["ratio"] for m in group if (m["policy"], m["run_ahead"]) == (policy, run_ahead)]
            parts.append(f"{name}: {median(ratios):.3f} (worst of {len(ratios)}: {max(ratios):.3f})")
        what = f"step over the sum of its kernels, dummy kernels of {pair[0]:g} + {pair[1]:g} ms, 8 streaming clients"
        rows.append((what, "; ".join(parts), _source("overlap", "overlap_cpu")))
    return rows


def _accept_lengths(results: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for key in sorted({(r["algorithm"], -r["temperature"], r["max_new_tokens"]) for r in results}):
        group = [r for r in results if (r["algorithm"], -r["temperature"], r["max_new_tokens"]) == key]
        lengths = [r["mean_accept_length"] for r in group]
        algorithm, temperature, num_tokens = key[0], -key[1], key[2]
        how = f"T = {temperature:g}, {len(group)} seeds" if temperature else "greedy"
        share = 100 * max(r["repeated_share"] for r in group)
        spread = f"{min(lengths):.2f} to {max(lengths):.2f}" if len(lengths) > 1 else f"{lengths[0]:.2f}"
        rows.append(
            (
                f"mean accept length of the bundled {algorithm} draft, K = {group[0]['num_draft_tokens']}, {how}, "
                f"first {num_tokens} tokens of {group[0]['num_prompts']} held-out prompts",
                f"{spread} (up to {share:.0f} % of the tokens lie in a repeated 5-gram)",
                _source("accept_length", "accept_length_cpu"),
            )
        )
    return rows


def _serving(report: dict[str, Any]) -> tuple[str, str, str]:
    parts = []
    for algorithm, capacity in report["capacity"].items():
        run = next(r for r in report["runs"] if (r["algorithm"], r["fraction"]) == (algorithm, SERVING_FRACTION))
        first, between = run["report"]["ttft_ms"], run["report"]["inter_token_ms"]
        parts.append(
            f"{DRAFTS[algorithm]}: capacity {capacity['tokens_per_second']:.0f} tokens/s; at "
            f"{run['offered_requests_per_second']:.1f} requests/s {first['p50']:.0f} ms to the first token (p99 "
            f"{first['p99']:.0f}), {between['p50']:.1f} ms between tokens (p99 {between['p99']:.1f})"
        )
    scale, temperature = report["lengths"]["scale"], report["temperature"]
    what = f"Poisson arrivals, ShareGPT-like lengths times {scale:g}, T = {temperature:g}"
    return what, "; ".join(parts), _source("serving", "serving_cpu")


def _overload(report: dict[str, Any]) -> tuple[str, str, str]:
    plan, load, rejection = report["plan"], report["load"], report["load"]["rejection_ms"]
    return (
        f"{plan['factor']:g} times the capacity for {plan['seconds']:.0f} s, standalone draft",
        f"goodput {report['goodput']:.2f} of the capacity; {load['num_rejected']} of {load['num_requests']} requests "
        f"refused, after {rejection['p50']:.1f} ms (p99 {rejection['p99']:.1f}, most {rejection['most']:.1f}), "
        f"{load['num_rejected'] - report['rejections_without_retry_info']} of them with a RetryInfo; health "
        f"{' and '.join(report['health']['statuses'])} throughout; "
        f"memory of the services grows by {100 * _growth(report['footprints']):.1f} % at most",
        _source("overload", "overload_cpu"),
    )


def _growth(footprints: dict[str, dict[str, Any]]) -> float:
    """Of resident memory, from the first third of the time to the last; 0 if all of them shrank."""
    return max(0.0, *(float(each["last_rss_kib"] / each["first_rss_kib"] - 1) for each in footprints.values()))


def _long_prompt(report: dict[str, Any]) -> tuple[str, str, str]:
    parts = []
    for result in report["results"]:
        if result["chunk_tokens"] not in LONG_PROMPT_CHUNKS:
            continue
        quiet, together = result["quiet_message_gap_ms"], result["message_gap_ms"]
        at_once = result["chunk_tokens"] >= report["plan"]["prompt_tokens"]
        parts.append(
            f"{'all at once' if at_once else 'chunks of ' + str(result['chunk_tokens'])}: {together['p50']:.0f} ms at "
            f"p50, at most {together['most']:.0f}, instead of {quiet['p50']:.0f} and {quiet['most']:.0f}"
        )
    what = (
        f"between messages of a running stream while a prompt of {report['plan']['prompt_tokens']:,} tokens comes in, "
        "and alone"
    )
    return what, "; ".join(parts), _source("long_prompt", "long_prompt_cpu")


def _lossless(found: dict[str, Any]) -> tuple[str, str, str]:
    drafts = ", ".join(name for name in found["algorithms"] if name != "none")
    run_aheads = found["run_aheads"]
    what = (
        f"{found['num_cases']} requests ({found['num_prompts']} prompts, greedy and at T = 0.8, with filters, "
        f"penalties, bias and a least length), each in {found['num_ways']} ways: without a draft and with {drafts}; "
        f"alone and in batches of {max(found['concurrencies'])}; run-ahead {run_aheads[0]} to {run_aheads[-1]}; "
        f"prompts whole and in chunks of {min(found['chunk_tokens'])}; drafts off for every other request"
    )
    outputs = f"{found['num_outputs']:,} outputs ({found['num_tokens']:,} tokens)"
    result = f"{found['num_different']} of {outputs} differ from plain decoding's"
    return what, result, _source("lossless", "lossless_cpu")


def _source(script: str, result: str) -> str:
    return f"[`{script}.py`](benchmarks/{script}.py), [JSON](benchmarks/results/{result}.json)"


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def gpu_page() -> str:
    """`docs/measured-on-a-gpu.md`."""
    return page(_load)


def main(write: Annotated[bool, typer.Option(help="Put them into README.md and docs/.")] = False) -> None:
    """Prints the figures, or puts them in their places."""
    if not write:
        print(table(), gpu_page(), sep="\n\n")
        return
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    GPU_PAGE.write_text(gpu_page(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
