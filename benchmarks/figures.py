"""The README's table and the pages of figures, from the results that are in the repository.

python benchmarks/figures.py            # prints the table
python benchmarks/figures.py --write    # writes it into README.md, and the pages of figures into docs/
"""

from __future__ import annotations

from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.benchmarks import decode_report, overlap, reliability
from slipstream.benchmarks.drafter_tables import DRAFT_NAMES, accept_length_section, every_drafter_section
from slipstream.benchmarks.load_results import capacity_section, load_sections, readme_rows
from slipstream.benchmarks.pages import RESULTS, ROOT, WRITTEN, load, markdown_table, section, text
from slipstream.benchmarks.peers import DRAFTING, DRAFTS, PLAIN, SHAPE_8B
from slipstream.benchmarks.result_files import read_rows
from slipstream.common.host import STEP_LOOP

if TYPE_CHECKING:
    from collections.abc import Sequence

README = ROOT / "README.md"
CPU_PAGE = ROOT / "docs" / "measured.md"
GPU_PAGE = ROOT / "docs" / "measured-on-a-gpu.md"
CAPACITY_PAGE = ROOT / "docs" / "capacity.md"
RELIABILITY_PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- figures: python benchmarks/figures.py --write -->"
END = "<!-- end of figures -->"


def table() -> str:
    """The README's table, with the hardware above it."""
    decode = read_rows(RESULTS / "decode_h200.json", decode_report.Measurement)
    kernels, on_cpu = (overlap.read_measurements(RESULTS / f"overlap_{where}.json") for where in ("h200", "cpu"))
    lossless = load("lossless_cpu")
    shapes = {m.batch: m for m in decode_report.medians(decode) if m.shape == "llama-3.1-8b"}
    rows = [
        f"decode step, 8B shape, batch {m.batch}; baseline: one process"
        f" | {m.of('step_ms'):.2f} ms | {m.one_process_ms:.2f} ms | {m.of('step_ms') / m.one_process_ms:.3f}"
        for m in (shapes[max(shapes)],)
    ]
    pair = _pairs(kernels)[0]
    steps = [m for m in _of(kernels, *pair, "run_ahead", 1) if m.mps and m.fence == "timeline"]
    rows.append(
        f"step, dummy kernels of {pair[0]:g} + {pair[1]:g} ms; baseline: their sum"
        f" | {median(m.step_ms for m in steps):.2f} ms | {sum(pair):.2f} ms | {median(m.ratio for m in steps):.3f}"
    )
    speeds = {r["way"]: r["tokens_per_second"] for r in load("peers_h200") if r["case"] == SHAPE_8B}
    rows.append(
        f"one request, 8B shape, EAGLE-3 head; baseline: without a draft | {speeds[DRAFTING]:.0f} tokens/s"
        f" | {speeds[PLAIN]:.0f} tokens/s | {speeds[DRAFTING] / speeds[PLAIN]:.2f}"
    )
    rows += readme_rows()
    for draft_ms, verify_ms in _pairs(on_cpu)[:1]:
        ours, host = (_of(on_cpu, draft_ms, verify_ms, *order) for order in (("run_ahead", 1), ("host_blocks", 0)))
        lost = " | ".join(f"{median(m.lost_ms for m in group):.2f} ms" for group in (ours, host))
        rows.append(
            f"lost per step on a CPU, dummy kernels of {draft_ms:g} + {verify_ms:g} ms; baseline: the host blocks"
            f" | {lost} | {median(m.lost_share for m in ours if m.lost_share is not None):.3f}"
        )
    num_different, num_outputs = lossless["num_different"], _num_compared(lossless)
    rows.append(
        "outputs on a CPU that differ from plain decoding's; baseline: all that were compared"
        f" | {num_different} | {num_outputs:,} | {num_different / num_outputs:g}"
    )
    hardware = f"{_short(decode[0].host)}; on a CPU: {_short(on_cpu[0].host, 2)}."
    return f"{hardware}\n\n{markdown_table('workload | Slipstream | baseline | ratio', rows)}"


def cpu_page() -> str:
    """`docs/measured.md`."""
    return _page(
        "# Measured on a CPU",
        "Two virtual cores; machines are noisy, and each ratio is taken within one run.",
        _overlap_section("overlap_cpu"),
        accept_length_section(),
        _lossless_section(),
        _serving_section(),
        load_sections("load_cpu"),
        _robustness_sections(),
        reliability.sections("cpu"),
    )


def gpu_page() -> str:
    """`docs/measured-on-a-gpu.md`."""
    return _page(
        "# Measured on a GPU",
        "Machines differ, also of one provider: each ratio is taken within one run.",
        _overlap_section("overlap_h200"),
        _decode_section(),
        _fp8_section(),
        every_drafter_section(),
        load_sections("load_h200"),
        _delivery_section(),
        _peers_section(),
        _near_ties_section(),
        reliability.sections("h200"),
    )


def _page(title: str, about: str, *sections: list[str]) -> str:
    return "\n\n".join((title, text(f"{WRITTEN} {about}"), *chain.from_iterable(sections))) + "\n"


def _overlap_section(name: str) -> list[str]:
    measurements = overlap.read_measurements(RESULTS / f"{name}.json")
    is_gpu = measurements[0].device == "cuda"
    columns = [(pair, mps) for pair in _pairs(measurements) for mps in sorted({m.mps for m in measurements})[::-1]]
    header = "order of steps" + "".join(
        f" | {draft_ms:g} + {verify_ms:g} ms{', no MPS' if is_gpu and not mps else ''} | lost share"
        for (draft_ms, verify_ms), mps in columns
    )
    rows = []
    for title in dict.fromkeys(m.title for m in measurements):
        row = title
        for pair, mps in columns:
            found = [m for m in measurements if (m.title, (m.draft_ms, m.verify_ms), m.mps) == (title, pair, mps)]
            shares = [m.lost_share for m in found if m.lost_share is not None]
            row += f" | {median(m.ratio for m in found):.3f} | {median(shares):.3f}" if found else " |  | "
        rows.append(row)
    words = (
        f"Dummy kernels of a known length, {measurements[0].num_clients} streaming clients, metrics on: the time of a "
        "step over the length of its kernels, and the part that it loses (step - busy) as a share of that of host "
        "blocks in the same repeat; medians. With host blocks, workers acknowledge work that is done, and each command "
        "waits for the acknowledgements that it needs."
    )
    if is_gpu:
        words += " Timeline fences and workers under MPS, unless a row or column says something else."
    table = markdown_table(header, rows)
    return section("A step over its kernels", "overlap", name, measurements[0].host, words, table)


def _decode_section() -> list[str]:
    measurements = read_rows(RESULTS / "decode_h200.json", decode_report.Measurement)
    words = (
        "Random weights, an EAGLE-3 head (*-mtp*: modules for multi-token prediction) with K = 4, a simulated accept "
        "length of 3.5, contexts that grow from 1,024 tokens to 1,400; medians. *Floor* is the time to read the step's "
        "bytes at the bandwidth of a copy. CPU time is that of each process, and of the *loop*, the thread of the "
        "scheduler that decides the steps. Draft and verify are processes of their own under MPS; *one process* is all "
        "of it in one, on one stream. Shapes that the last run left out are of an earlier one."
    )
    sections = section("Decode steps", "decode", "decode_h200", measurements[0].host, words)
    times = "batch | tokens/s | step, ms | draft, ms | verify, ms | bubble, ms"
    cpu = "CPU, ms: loop | scheduler | draft | verify"
    ratios = "batch | overlap efficiency | step / one process | verify / floor | draft / floor"
    found = decode_report.medians(measurements)
    for shape in dict.fromkeys(m.shape for m in found):
        mine = [m for m in found if m.shape == shape]
        in_ms = [
            f"{m.batch} | {m.of('tokens_per_second'):,.0f} | "
            + " | ".join(f"{m.of(name):.3f}" for name in ("step_ms", "draft_ms", "verify_ms", "bubble_ms"))
            + "".join(map(_cell, map(m.cpu_ms, (STEP_LOOP, "scheduler", "draft", "verify"))))
            for m in mine
        ]
        in_ratios = [
            f"{m.batch} | {m.overlap_efficiency:.4f} | {m.of('step_ms') / m.one_process_ms:.4f}"
            + "".join(map(_cell, map(m.over_floor, ("verify", "draft"))))
            for m in mine
        ]
        repeats = f"Repeats of each mode, in turns: {len(mine[0].three)}."
        sections += [
            f"### {shape}",
            repeats,
            markdown_table(f"{times} | {cpu}", in_ms),
            markdown_table(ratios, in_ratios),
        ]
    return sections


def _fp8_section() -> list[str]:
    measurements = read_rows(RESULTS / "plain_h200.json", decode_report.Measurement)
    steps = {
        key: median(m.step_ms for m in measurements if (m.shape, m.batch) == key)
        for key in dict.fromkeys((m.shape, m.batch) for m in measurements)
    }
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
    return section("FP8 weights", "decode", "plain_h200", measurements[0].host, words, table)


def _peers_section() -> list[str]:
    results = load("peers_h200")
    first, fastest = results[0], {r["case"]: r["tokens_per_second"] for r in reversed(results)}
    rows = [
        f"{r['case']} | {r['way']} | {DRAFTS.get((r['case'], r['way']), 'none')} | {r['tokens_per_second']:,.0f} | "
        f"{r['mean_accept_length']:.2f} | {fastest[r['case']] / r['tokens_per_second']:.2f}"
        for r in results
    ]
    words = (
        f"The same target, prompt ({first['prompt_tokens']} tokens) and length ({first['num_new_tokens']} tokens) on "
        f"both sides, {first['dtype']}, K = {first['num_draft_tokens']}; the drafts differ as the table says, because "
        "`transformers` has no EAGLE-3 head. The 8B shape has random weights. Draft and verify are processes of their "
        "own without MPS; one way is measured after the other."
    )
    table = markdown_table(f"target | way | draft | tokens/s | accept length | {first['way']} is faster by", rows)
    where = f"{first['hardware']}, {first['host']}"
    return section("One request, against `transformers`", "peers", "peers_h200", where, words, table)


def _near_ties_section() -> list[str]:
    report = load("near_ties_h200")
    compared = [row for row in report["rows"] if (row["draft"], row["at_once"]) != ("none", 1)]
    rows = [
        f"{'yes' if row['deterministic'] else 'no'} | {DRAFT_NAMES[row['draft']]} | {row['at_once']} | "
        f"{row['outputs']} | {row['partings']} | {row['per_1000_tokens']:.2f} | "
        + ("" if row["largest_gap"] is None else f"{row['largest_gap']:.3f}")
        for row in compared
    ]
    prices = [
        f"{DRAFT_NAMES[price['draft']]} | {price['at_once']} | {price['step_us'] / 1000:.2f} | "
        f"{price['deterministic_step_us'] / 1000:.2f} | {price['ratio']:.2f}"
        for price in report["prices"]
    ]
    num_far = sum(not row["all_near_ties"] for row in report["rows"])
    words = (
        "The bundled model against plain decoding of one request at a time. Products of other sizes round differently, "
        "and a token whose score is nearly the best may replace it. So each output is followed to where it first "
        f"parts, and the gap of the scores there compared with {report['bound']:g}: rows with a larger one: {num_far}."
    )
    table = markdown_table("`--deterministic` | draft | at once | outputs | part | in 1,000 tokens | largest gap", rows)
    price = "The price of `--deterministic`, for a model so small that the host bounds many of these steps:"
    title = "Which outputs differ, in bfloat16"
    prices_table = markdown_table("draft | at once | step, ms | deterministic, ms | ratio", prices)
    return section(title, "near_ties", "near_ties_h200", report["host"], words, table, price, prices_table)


def _num_compared(lossless: dict[str, Any]) -> int:
    """Outputs but for those of the way that the others are compared with."""
    return int(lossless["num_outputs"] - lossless["num_cases"])


def _lossless_section() -> list[str]:
    found = load("lossless_cpu")
    drafts = ", ".join(name for name in found["algorithms"] if name != "none")
    words = (
        f"{found['num_different']} of {_num_compared(found):,} outputs differ from plain decoding's, one request at a "
        f"time: {found['num_cases']} requests ({found['num_prompts']} prompts, greedy and at T = 0.8, with "
        f"filters, penalties, bias and a least length), each in {found['num_ways'] - 1} ways: without a draft and with "
        f"{drafts}; alone and in batches of {max(found['concurrencies'])}; run-ahead {found['run_aheads'][0]} to "
        f"{found['run_aheads'][-1]}; prompts whole and in chunks of {min(found['chunk_tokens'])}; drafts off for every "
        "other request."
    )
    return section("The same tokens in every way", "lossless", "lossless_cpu", "", words)


def _serving_section() -> list[str]:
    report = load("serving_cpu")
    rows = [
        f"{DRAFT_NAMES[run['algorithm']]} | {run['offered_requests_per_second']:.1f} | "
        f"{run['report']['tokens_per_second']:.0f} | "
        + " | ".join(
            f"{run['report'][times][p]:.1f}" for times in ("ttft_ms", "inter_token_ms") for p in ("p50", "p99")
        )
        for run in report["runs"]
    ]
    capacity = ", ".join(
        f"{DRAFT_NAMES[name]} {found['tokens_per_second']:.0f}" for name, found in report["capacity"].items()
    )
    words = (
        f"Poisson arrivals, ShareGPT-like lengths times {report['lengths']['scale']:g}, T = {report['temperature']:g}. "
        f"Capacity by saturation, in tokens/s, by draft: {capacity}. Drafting spends compute to save time, and two "
        "busy cores have none to spare."
    )
    table = markdown_table("draft | requests/s | tokens/s | first token, ms | p99 | between tokens, ms | p99", rows)
    picture = "![Throughput and latency against offered load](../benchmarks/results/serving_cpu.png)"
    return section("Latency against load", "serving", "serving_cpu", report["host"], words, table, picture)


def _robustness_sections() -> list[str]:
    """Overload, and a long prompt."""
    over, long = load("overload_cpu"), load("long_prompt_cpu")
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
    rows = [
        f"{r['max_batched_tokens']} | "
        + " | ".join(
            f"{r[gaps][p]:.0f}" for gaps in ("quiet_message_gap_ms", "message_gap_ms") for p in ("p50", "most")
        )
        + f" | {median(r['first_token_s']):.2f}"
        for r in long["results"]
    ]
    prompt = (
        f"Milliseconds between messages of a running stream, alone and while a prompt of "
        f"{long['plan']['prompt_tokens']:,} tokens comes in, by `--max-batched-tokens`; and its own first token."
    )
    gaps = markdown_table("tokens a step | alone, p50 | most | with the prompt, p50 | most | first token, s", rows)
    picture = "![A running stream while a long prompt comes in](../benchmarks/results/long_prompt_cpu.png)"
    title = "A long prompt beside a stream"
    return [
        *section("Overload", "overload", "overload_cpu", over["host"], words),
        *section(title, "long_prompt", "long_prompt_cpu", long["host"], prompt, gaps, picture),
    ]


def _delivery_section() -> list[str]:
    found = load("delivery_h200")
    other = "The same on another machine of that kind ([JSON](../benchmarks/results/delivery_h200_other_host.json)):"
    words = (
        "Shape of Llama-3.1-8B with random weights, EAGLE-3 head, K = 4, accept length 3.5 by chance. Clients are "
        "processes of their own on the same host, a connection a stream. From when a step's result is on the host to "
        "a client's receipt of its tokens; CPU time a decode step of the thread that decides the steps, and of the "
        "processes."
    )
    more = _delivery_table(found), text(other), _delivery_table(load("delivery_h200_other_host"))
    return section("From a step to its clients", "delivery", "delivery_h200", found[0]["host"], words, *more)


def _delivery_table(found: list[dict[str, Any]]) -> str:
    rows = [
        f"{r['batch']} | {r['gateways']} | {r['journal']} | {r['step_ms']:.2f} | "
        + "".join(f"{r[f'publish_to_client_{part}_ms']:.1f} | " for part in ("p50", "p99"))
        + f"{r['cpu_ms'][STEP_LOOP]:.2f} | {r['cpu_ms']['scheduler']:.2f} | "
        + f"{sum(ms for name, ms in r['cpu_ms'].items() if name.startswith('gateway')):.1f}"
        for r in found
    ]
    header = "streams | gateways | journal | step, ms | to client p50, ms | p99, ms | loop | scheduler | gateways"
    return markdown_table(header, rows)


def _pairs(measurements: Sequence[overlap.Measurement]) -> list[tuple[float, float]]:
    return sorted({(m.draft_ms, m.verify_ms) for m in measurements}, reverse=True)


def _of(
    measurements: Sequence[overlap.Measurement], draft_ms: float, verify_ms: float, policy: str, run_ahead: int
) -> list[overlap.Measurement]:
    wanted = (draft_ms, verify_ms, policy, run_ahead)
    return [m for m in measurements if (m.draft_ms, m.verify_ms, m.policy, m.run_ahead) == wanted]


def _cell(value: float | None) -> str:
    return " | " if value is None else f" | {value:.2f}"


def _short(host: str, num_parts: int = 1) -> str:
    """The first parts of a host's description."""
    return ", ".join(host.split(", ")[:num_parts])


def main(write: Annotated[bool, typer.Option(help="Write them into README.md and docs/.")] = False) -> None:
    """Prints the table, or writes it and the pages."""
    if not write:
        print(table())
        return
    for page, figures in ((README, table()), (CAPACITY_PAGE, capacity_section())):
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{figures}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    CPU_PAGE.write_text(cpu_page(), encoding="utf-8")
    GPU_PAGE.write_text(gpu_page(), encoding="utf-8")
    RELIABILITY_PAGE.write_text(reliability.filled(RELIABILITY_PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
