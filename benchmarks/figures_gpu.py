"""Rows of the README's table that a GPU's results make: those whose files are in the repository."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from slipstream.benchmarks.decode_report import Measurement, Medians, medians
from slipstream.benchmarks.overlap_policies import Policy
from slipstream.common.host import STEP_LOOP

if TYPE_CHECKING:
    from collections.abc import Iterable

Row = tuple[str, str]
"""What was measured, and what came out."""


def overlap_rows(measurements: list[dict[str, Any]]) -> list[Row]:
    """One for each pair of dummy kernels: every policy under MPS, and the best of them without."""
    rows = []
    gpu = _gpu(measurements[0])
    for pair in sorted({(m["draft_ms"], m["verify_ms"]) for m in measurements}, reverse=True):
        groups: dict[tuple[bool, str], list[float]] = {}
        for m in measurements:
            if (m["draft_ms"], m["verify_ms"]) == pair:
                policy = Policy(name=m["policy"], run_ahead=m["run_ahead"], fence=m["fence"])
                groups.setdefault((m["mps"], policy.title), []).append(m["ratio"])
        under, without = (
            _listed((title, r) for (has, title), r in groups.items() if has is mps) for mps in (True, False)
        )
        what = (
            f"step over the sum of its kernels on an {gpu}, dummy kernels of {pair[0]:g} + {pair[1]:g} ms, "
            f"{measurements[0]['num_clients']} streaming clients"
        )
        rows.append((what, f"under MPS: {under}" + (f"; without: {without}" if without else "")))
    return rows


def _listed(groups: Iterable[tuple[str, list[float]]]) -> str:
    return ", ".join(f"{title} {median(ratios):.3f}" for title, ratios in groups)


def decode_rows(measurements: list[dict[str, Any]]) -> list[Row]:
    """One for each shape."""
    rows = []
    for shape in dict.fromkeys(m["shape"] for m in measurements):
        mine = [m for m in measurements if m["shape"] == shape]
        lengths = [m["mean_accept_length"] for m in mine]
        what = (
            f"decoding with random weights of the shape {shape} on an {_gpu(mine[0])}, EAGLE-3 head, accept length "
            f"{min(lengths):.2f} to {max(lengths):.2f} by chance, contexts of 1,024 to 1,400 tokens"
        )
        rows.append((what, _decoding(medians([Measurement(**m) for m in mine]))))
    return rows


def _decoding(batches: list[Medians]) -> str:
    """Of one shape."""
    batches = sorted(batches, key=lambda m: m.batch)
    smallest, largest = batches[0], batches[-1]
    said = (
        f"tokens/s at batch {', '.join(str(m.batch) for m in batches)}: "
        f"{', '.join(f'{m.tokens_per_second:,.0f}' for m in batches)}; a step takes at most "
        f"{max(m.over_kernels for m in batches):.3f} of its kernels and {max(m.over_one for m in batches):.3f} of one "
        f"process; overlap efficiency at least {min(m.overlap_efficiency for m in batches):.3f}; "
    )
    if smallest.verify_over_floor is not None:
        said += (
            f"at batch {smallest.batch} verify takes {smallest.verify_over_floor:.2f} and draft "
            f"{smallest.draft_over_floor:.2f} of what reading their bytes does; "
        )
    return (
        f"{said}CPU time of a step at batch {largest.batch}: step loop {largest.cpu_ms[STEP_LOOP]:.2f} ms, whole "
        f"scheduler {largest.cpu_ms['scheduler']:.2f} ms"
    )


def peers_rows(results: list[dict[str, Any]]) -> list[Row]:
    """One for each pair of models."""
    rows = []
    for case in dict.fromkeys(result["case"] for result in results):
        mine = [result for result in results if result["case"] == case]
        parts = [f"{r['way']} {r['tokens_per_second']:.0f} (accept length {r['mean_accept_length']:.2f})" for r in mine]
        rows.append(
            (f"tokens/s of one request on an {mine[0]['hardware']}, {case}, {mine[0]['dtype']}", "; ".join(parts))
        )
    return rows


def _gpu(measurement: dict[str, Any]) -> str:
    return str(measurement["host"]).partition(",")[0]
