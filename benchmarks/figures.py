"""The README's table and the pages of figures, from the results that are in the repository.

python benchmarks/figures.py            # prints the table
python benchmarks/figures.py --write    # writes it into README.md, and the pages of figures into docs/
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks import overlap, reliability, sections
from slipstream.benchmarks.peers import DRAFTING, PLAIN, SHAPE_8B
from slipstream.benchmarks.sections import ROOT, SHAPE, WRITTEN, load, markdown_table, median_of, text

if TYPE_CHECKING:
    from slipstream.benchmarks.runner import Row

README = ROOT / "README.md"
CPU_PAGE = ROOT / "docs" / "measured.md"
GPU_PAGE = ROOT / "docs" / "measured-on-a-gpu.md"
CAPACITY_PAGE = ROOT / "docs" / "capacity.md"
RELIABILITY_PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- figures: python benchmarks/figures.py --write -->"
END = "<!-- end of figures -->"


def table() -> str:
    """The README's table, with the hardware above it."""
    decode, kernels, on_cpu, lossless = map(load, ("decode_h200", "overlap_h200", "overlap_cpu", "lossless_cpu"))
    step = max((m for m in sections.decode_medians(decode) if m["shape"] == SHAPE), key=lambda m: int(m["batch"]))
    rows = [
        "decode step, 8B shape, batch {batch}; baseline: one process | {step_ms:.2f} ms | {one_process_ms:.2f} ms | "
        "{ratio:.3f}".format_map(step)
    ]
    pair = sections.pairs_of(kernels)[0]
    steps = [m for m in kernels if _order(m) == (*pair, overlap.RUN_AHEAD, 1) and m["mps"] and m["fence"] == "timeline"]
    rows.append(
        f"step, dummy kernels of {pair[0]:g} + {pair[1]:g} ms; baseline: their sum"
        f" | {median_of(steps, 'step_ms'):.2f} ms | {sum(pair):.2f} ms | {median_of(steps, 'ratio'):.3f}"
    )
    speeds = {r["way"]: r["tokens_per_second"] for r in load("peers_h200") if r["case"] == SHAPE_8B}
    rows.append(
        f"one request, 8B shape, EAGLE-3 head; baseline: without a draft | {speeds[DRAFTING]:.0f} tokens/s"
        f" | {speeds[PLAIN]:.0f} tokens/s | {speeds[DRAFTING] / speeds[PLAIN]:.2f}"
    )
    rows += sections.load_rows()
    pair = sections.pairs_of(on_cpu)[0]
    ours, blocking = (
        [m | {"lost_ms": overlap.lost_ms(m)} for m in on_cpu if _order(m) == (*pair, *order)]
        for order in ((overlap.RUN_AHEAD, 1), (overlap.HOST_BLOCKS, 0))
    )
    lost = " | ".join(f"{median_of(group, 'lost_ms'):.2f} ms" for group in (ours, blocking))
    rows.append(
        f"lost per step on a CPU, dummy kernels of {pair[0]:g} + {pair[1]:g} ms; baseline: the host blocks"
        f" | {lost} | {median_of(ours, 'lost_share'):.3f}"
    )
    num_different, num_outputs = lossless["num_different"], sections.num_compared(lossless)
    rows.append(
        "outputs on a CPU that differ from plain decoding's; baseline: all that were compared"
        f" | {num_different} | {num_outputs:,} | {num_different / num_outputs:g}"
    )
    gpu, cpu = (", ".join(found[0]["host"].split(", ")[:parts]) for found, parts in ((decode, 1), (on_cpu, 2)))
    header = "workload | Slipstream | baseline | ratio"
    return f"{gpu}; on a CPU: {cpu}.\n\n{markdown_table(header, rows)}"


def _order(row: Row) -> tuple[object, ...]:
    return row["draft_ms"], row["verify_ms"], row["policy"], row["run_ahead"]


def cpu_page() -> str:
    """`docs/measured.md`."""
    return _page(
        "# Measured on a CPU",
        "Two virtual cores; machines are noisy, and each ratio is taken within one run.",
        sections.overlap_section("overlap_cpu"),
        sections.accept_length_section(),
        sections.lossless_section(),
        sections.serving_section(),
        sections.load_sections("load_cpu"),
        sections.overload_section(),
        sections.long_prompt_section(),
        reliability.sections("cpu"),
    )


def gpu_page() -> str:
    """`docs/measured-on-a-gpu.md`."""
    return _page(
        "# Measured on a GPU",
        "Machines differ, also of one provider: each ratio is taken within one run.",
        sections.overlap_section("overlap_h200"),
        sections.decode_section(),
        sections.fp8_section(),
        sections.every_drafter_section(),
        sections.load_sections("load_h200"),
        sections.delivery_section(),
        sections.peers_section(),
        sections.near_ties_section(),
        reliability.sections("h200"),
    )


def _page(title: str, about: str, *parts: list[str]) -> str:
    return "\n\n".join((title, text(f"{WRITTEN} {about}"), *chain.from_iterable(parts))) + "\n"


def main(write: Annotated[bool, typer.Option(help="Write them into README.md and docs/.")] = False) -> None:
    """Prints the table, or writes it and the pages."""
    if not write:
        print(table())
        return
    for page, figures in ((README, table()), (CAPACITY_PAGE, sections.capacity_section())):
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{figures}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    CPU_PAGE.write_text(cpu_page(), encoding="utf-8")
    GPU_PAGE.write_text(gpu_page(), encoding="utf-8")
    RELIABILITY_PAGE.write_text(reliability.filled(RELIABILITY_PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
