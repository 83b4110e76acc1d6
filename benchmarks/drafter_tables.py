"""Tables of every drafter: its accept length, what it brings, and what a step with it takes."""

from __future__ import annotations

from statistics import median

from slipstream.benchmarks import decode_report
from slipstream.benchmarks.pages import RESULTS, load, markdown_table, section, text
from slipstream.benchmarks.result_files import read_rows

DRAFT_NAMES = {
    "none": "none",
    "standalone": "standalone",
    "standalone_auto": "standalone, `auto`",
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE",
    "mtp": "MTP modules",
    "ngram": "n-grams",
    "ngram_suffix": "n-grams, and outputs",
}
SHAPE = "llama-3.1-8b"
BATCHES = (1, 8, 32, 64)


def accept_length_section() -> list[str]:
    """The bundled drafts' and prompt lookup's accept lengths on a CPU."""
    results, rows = load("accept_length_cpu"), []
    names = ("algorithm", "num_draft_tokens", "workload", "temperature", "max_new_tokens")
    keys = [tuple(result[name] for name in names) for result in results]
    for key in dict.fromkeys(keys):
        group = [r for r, own in zip(results, keys, strict=True) if own == key]
        lengths = sorted(r["mean_accept_length"] for r in group)
        spread = f"{lengths[0]:.2f} to {lengths[-1]:.2f}" if len(group) > 1 else f"{lengths[0]:.2f}"
        repeated = f"{100 * max(r['repeated_share'] for r in group):.0f} %"
        draft, count, workload, temperature, tokens = key
        about = f"{DRAFT_NAMES[draft]} | {count} | {workload} | {temperature:g} | {tokens}"
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
    columns = {(r["workload"], r["temperature"], r["max_new_tokens"]): None for r in results}
    cells = {
        (r["algorithm"], r["num_draft_tokens"], r["workload"], r["temperature"], r["max_new_tokens"]): (
            f"{r['mean_accept_length']:.2f} | {r['tokens_per_second']:,.0f}"
        )
        for r in results
    }
    rows = [
        " | ".join((DRAFT_NAMES[draft], str(count), *(cells.get((draft, count, *column), " | ") for column in columns)))
        for draft, count in dict.fromkeys((r["algorithm"], r["num_draft_tokens"]) for r in results)
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
    plain, drafting = (
        read_rows(RESULTS / f"{name}.json", decode_report.Measurement) for name in ("plain_h200", "decode_h200")
    )
    shapes = {
        "none": (decode_report.PLAIN, SHAPE),
        "standalone": (decode_report.THREE, f"{SHAPE}-standalone"),
        "eagle3": (decode_report.THREE, SHAPE),
        "eagle": (decode_report.THREE, f"{SHAPE}-eagle"),
        "mtp": (decode_report.THREE, f"{SHAPE}-mtp"),
        "ngram": (decode_report.THREE, f"{SHAPE}-ngram"),
    }
    rows = []
    for draft, key in shapes.items():
        found = [m for m in (*plain, *drafting) if (m.mode, m.shape) == key]
        times = [[m.step_ms for m in found if m.batch == batch] for batch in BATCHES]
        repeats = len({m.repeat for m in found}) or ""
        rows.append(f"{DRAFT_NAMES[draft]} | {repeats} | " + " | ".join(f"{median(t):.2f}" if t else "" for t in times))
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
