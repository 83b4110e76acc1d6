"""`docs/measured-on-a-gpu.md`: tables of what was measured on a GPU, from the results that are in the repository."""

from __future__ import annotations

from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks.decode_report import Measurement, Medians, medians
from slipstream.benchmarks.overlap_policies import Policy
from slipstream.common.host import STEP_LOOP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Rows = list[dict[str, Any]]
"""Of a file of results."""

DRAFTS = {"none": "none", "standalone": "standalone", "eagle3": "EAGLE-3"}
INTRODUCTION = (
    "Written by `python benchmarks/figures.py --write` from the files that each section names. Machines differ, those "
    "of one provider too: each ratio is taken within one run."
)
LINE = 120
STEP_TIMES = (
    *("batch", "tokens/s", "step, ms", "draft, ms", "verify, ms", "bubble, ms"),
    *("CPU, ms: loop", "scheduler", "draft", "verify"),
)
STEP_RATIOS = (
    *("batch", "overlap efficiency", "step / its kernels", "step / one process"),
    *("verify / floor", "draft / floor"),
)


def page(load: Callable[[str], Any]) -> str:
    """Markdown. `load` gives what a file of results holds, by its name."""
    sections = [
        "# Measured on a GPU",
        _text(INTRODUCTION),
        *_overlap(load("overlap_h200")),
        *_decode(load("decode_h200")),
        *_peers(load("peers_h200")),
        *_attention(load("attention_h200")),
        *_near_ties(load("near_ties_h200")),
    ]
    return "\n\n".join(sections) + "\n"


def _overlap(measurements: Rows) -> list[str]:
    """Policies down, dummy kernels across."""
    pairs = sorted({(m["draft_ms"], m["verify_ms"]) for m in measurements}, reverse=True)
    columns = [(pair, has_mps) for pair in pairs for has_mps in (True, False)]
    ratios: dict[str, dict[tuple[tuple[float, float], bool], list[float]]] = {}
    for m in measurements:
        title = Policy(name=m["policy"], run_ahead=m["run_ahead"], fence=m["fence"]).title
        place = ((m["draft_ms"], m["verify_ms"]), m["mps"])
        ratios.setdefault(title, {}).setdefault(place, []).append(m["ratio"])
    header = ["order of steps", *(f"{d:g} + {v:g} ms{'' if mps else ', no MPS'}" for (d, v), mps in columns)]
    rows = [[title, *(_ratio(found.get(column)) for column in columns)] for title, found in ratios.items()]
    return [
        "## A step over the sum of its kernels",
        _source("overlap", "overlap_h200", measurements[0]["host"]),
        _text(
            f"Dummy kernels of a known length, {measurements[0]['num_clients']} streaming clients, metrics on. "
            "Draft and verify are processes of their own, under MPS and behind timeline fences where nothing else is "
            "said; one order is measured after the other. "
            "[`overlap_policies.py`](../benchmarks/overlap_policies.py) says what each is."
        ),
        _table(header, rows),
    ]


def _ratio(repeats: list[float] | None) -> str:
    """Empty where nothing was measured."""
    return f"{median(repeats):.3f}" if repeats else ""


def _decode(measurements: Rows) -> list[str]:
    """Two tables a shape: what a step takes, and how it compares."""
    first = measurements[0]
    sections = [
        "## Decode steps",
        _source("decode", "decode_h200", first["host"]),
        _text(
            "Random weights, an EAGLE-3 head with K = 4, an accept length of 3.5 by chance, contexts that grow from "
            "1,024 tokens to 1,400; medians. *Floor* is what must be read over the bandwidth of a copy. CPU time is "
            "that of each process, and of the *loop*, the thread of the scheduler that decides the steps. Draft and "
            "verify are processes of their own under MPS; *one process* is all of it in one, on one stream."
        ),
    ]
    found = medians([Measurement(**m) for m in measurements])
    for shape in dict.fromkeys(m.shape for m in found):
        mine = [m for m in found if m.shape == shape]
        sections += [
            f"### {shape}",
            f"{mine[0].num_repeats} repeats of each mode, in turns.",
            _table(STEP_TIMES, [_step_times(m) for m in mine]),
            _table(STEP_RATIOS, [_step_ratios(m) for m in mine]),
        ]
    return sections


def _step_times(m: Medians) -> list[str]:
    times = (m.step_ms, m.draft_ms, m.verify_ms, m.bubble_ms)
    cpu = (m.cpu_ms[name] for name in (STEP_LOOP, "scheduler", "draft", "verify"))
    return [
        *(str(m.batch), f"{m.tokens_per_second:,.0f}"),
        *(f"{time:.3f}" for time in times),
        *(f"{time:.2f}" for time in cpu),
    ]


def _step_ratios(m: Medians) -> list[str]:
    floors = (m.verify_over_floor, m.draft_over_floor)
    return [
        *(str(m.batch), f"{m.overlap_efficiency:.4f}", f"{m.over_kernels:.4f}", f"{m.over_one:.4f}"),
        *("" if floor is None else f"{floor:.2f}" for floor in floors),
    ]


def _peers(results: Rows) -> list[str]:
    """Each way, and how many times as fast the first one is."""
    first = results[0]
    rows = []
    for case in dict.fromkeys(result["case"] for result in results):
        mine = [result for result in results if result["case"] == case]
        rows += [
            [
                *(case, result["way"], f"{result['tokens_per_second']:,.0f}", f"{result['mean_accept_length']:.2f}"),
                f"{mine[0]['tokens_per_second'] / result['tokens_per_second']:.2f}",
            ]
            for result in mine
        ]
    return [
        "## One request, against `transformers`",
        _source("peers", "peers_h200", f"{first['hardware']}, {first['host']}"),
        _text(
            f"The same weights, prompt ({first['prompt_tokens']} tokens) and length ({first['num_new_tokens']} "
            f"tokens), {first['dtype']}, K = {first['num_draft_tokens']}. The 8B shape has random weights, and its "
            "drafts are accepted by chance on both sides. Draft and verify are processes of their own without MPS; one "
            "way is measured after the other."
        ),
        _table(("models", "way", "tokens/s", "accept length", f"{first['way']} is faster by"), rows),
    ]


def _attention(result: dict[str, Any]) -> list[str]:
    """Contexts across, batches down."""
    places = {(m["batch"], m["context"]): m for m in result["measurements"]}
    contexts = sorted({context for _, context in places})
    rows = [
        [str(batch), *(_attended(places.get((batch, context))) for context in contexts)]
        for batch in sorted({batch for batch, _ in places})
    ]
    return [
        "## Attention over pages",
        _source("attention", "attention_h200", f"{result['host']}, PyTorch {result['torch']}"),
        _text(
            f"8B shape, {result['width']} query tokens, bfloat16: the share of the bandwidth of a copy "
            f"({result['copy_terabytes_per_second']:.2f} TB/s), and how many times as long PyTorch's attention takes."
        ),
        _table(("batch", *(f"context {context:,}" for context in contexts)), rows),
    ]


def _attended(place: dict[str, Any] | None) -> str:
    if place is None:
        return ""
    return f"{100 * place['share_of_bandwidth']:.0f} %, {place['torch_us'] / place['kernel_us']:.1f}"


def _near_ties(report: dict[str, Any]) -> list[str]:
    """How often outputs part, and what it takes that they do not."""
    rows = [
        [
            *("yes" if row["deterministic"] else "no", DRAFTS[row["draft"]], str(row["at_once"])),
            *(f"{row['outputs']}", f"{row['partings']}", f"{row['per_1000_tokens']:.2f}"),
            "" if row["largest_gap"] is None else f"{row['largest_gap']:.3f}",
        ]
        for row in report["rows"]
    ]
    num_far = sum(not row["all_near_ties"] for row in report["rows"])
    prices = [
        [
            *(DRAFTS[price["draft"]], str(price["at_once"]), f"{price['step_us'] / 1000:.2f}"),
            *(f"{price['deterministic_step_us'] / 1000:.2f}", f"{price['ratio']:.2f}"),
        ]
        for price in report["prices"]
    ]
    return [
        "## Which outputs differ, in bfloat16",
        _source("near_ties", "near_ties_h200", report["host"]),
        _text(
            "The bundled model, all in one process, against plain decoding of one request at a time. Products of other "
            "sizes round differently, and a token whose score is all but the best one's may come in its place. So each "
            "output is followed to where it first parts, and the gap of the scores there held against "
            f"{report['bound']:g}: "
            f"{num_far or 'none'} of the rows below {'has' if num_far == 1 else 'have'} a larger one."
        ),
        _table(("`--deterministic`", "draft", "at once", "outputs", "part", "in 1,000 tokens", "largest gap"), rows),
        "What `--deterministic` takes, of a model so small that the host bounds many of these steps:",
        _table(("draft", "at once", "step, ms", "deterministic, ms", "ratio"), prices),
    ]


def _source(script: str, result: str, where: str) -> str:
    return _text(f"[`{script}.py`](../benchmarks/{script}.py), [JSON](../benchmarks/results/{result}.json); {where}.")


def _text(paragraph: str) -> str:
    return fill(paragraph, LINE, break_long_words=False, break_on_hyphens=False)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])
