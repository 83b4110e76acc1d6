"""The measurements of `serving` in lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.benchmarks.serving_stack import NONE

if TYPE_CHECKING:
    from slipstream.benchmarks.serving import ServingReport, ServingRun

MOST_FRACTION = 0.85
"""Beyond it queues grow for as long as the window is: their ratio would say more about that than about the server."""


def run_line(run: ServingRun) -> str:
    """One rate with one algorithm."""
    report = run.report
    return (
        f"{run.algorithm:<10} {run.offered_requests_per_second:6.2f} requests/s offered: "
        f"{report.tokens_per_second:6.0f} tokens/s, ttft {report.ttft_ms.p50:.0f} / {report.ttft_ms.p99:.0f} ms, "
        f"between tokens {report.inter_token_ms.p50:.1f} / {report.inter_token_ms.p99:.1f} ms, end to end "
        f"{report.end_to_end_ms.p50:.0f} / {report.end_to_end_ms.p99:.0f} ms (p50 / p99), {report.num_completed} "
        f"completed, {report.num_rejected} rejected, made {report.lateness_ms.p99:.1f} ms late at p99"
    )


def ratio_lines(report: ServingReport) -> list[str]:
    """Each algorithm over plain decoding in the same run: the capacity, and what latencies become at each rate."""
    lines = []
    for algorithm, capacity in report.capacity.items():
        if algorithm == NONE or NONE not in report.capacity:
            continue
        plain = report.capacity[NONE].tokens_per_second
        lines.append(f"{algorithm} over none: capacity {capacity.tokens_per_second / plain:.3f}")
        pairs = {(run.algorithm, run.fraction): run for run in report.runs}
        for fraction in report.plan.fractions:
            ours, theirs = pairs[algorithm, fraction], pairs[NONE, fraction]
            if theirs.offered_tokens_per_second > MOST_FRACTION * plain:
                continue
            ratio = ours.report.end_to_end_ms.p50 / theirs.report.end_to_end_ms.p50
            between = ours.report.inter_token_ms.p50 / theirs.report.inter_token_ms.p50
            first = ours.report.ttft_ms.p50 / theirs.report.ttft_ms.p50
            lines.append(
                f"{algorithm} over none at {ours.offered_requests_per_second:.2f} requests/s, medians: "
                f"to the first token {first:.3f}, between tokens {between:.3f}, end to end {ratio:.3f}"
            )
    return lines
