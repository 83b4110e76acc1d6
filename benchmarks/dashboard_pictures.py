"""Pictures of the dashboards, from their own queries against a real Prometheus that scrapes the real services.

    python benchmarks/dashboard_pictures.py

The Overlap dashboard for run-ahead 0 and 1, with stand-ins of a known length as kernels; the others with the
bundled models. Needs Debian's `prometheus`.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.benchmarks.dashboard_drawing import PanelResult, draw_dashboard
from slipstream.benchmarks.dashboard_queries import boards, panels_of
from slipstream.benchmarks.observed_stack import busy, observed_stack

if TYPE_CHECKING:
    from slipstream.benchmarks.dashboard_queries import FoundPanel, FoundQuery
    from slipstream.benchmarks.prometheus_server import Prometheus, Series

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
RESULTS = Path(__file__).resolve().parent / "results" / "dashboards_cpu.json"
DRAFT_MS, VERIFY_MS = 1.0, 4.0
NUM_CLIENTS = 8
INTERVAL_MS = 1000
RATE_INTERVAL = "5s"
WARM_UP_S = 8.0
OVERLAP = "slipstream-overlap.json"
STAND_IN_MODELS = f"stand-ins of {DRAFT_MS:g} + {VERIFY_MS:g} ms"


def main(
    seconds: Annotated[float, typer.Option(help="How long each picture's server is watched.")] = 40.0,
    pictures: Annotated[Path, typer.Option(help="Folder for the pictures.")] = PICTURES,
    json_file: Annotated[Path, typer.Option("--json", help="Where the panels' mean values go.")] = RESULTS,
) -> None:
    """Runs the servers, asks the queries, draws."""
    means = asyncio.run(_all(seconds, pictures))
    host = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    json_file.write_text(json.dumps({"host": host, "seconds": seconds, "dashboards": means}, indent=1) + "\n")
    for name, panels in means.items():
        print(name, json.dumps(panels.get("Share of a step that is lost", "")))


async def _all(seconds: float, pictures: Path) -> dict[str, dict[str, dict[str, float]]]:
    means = {}
    for run_ahead in (0, 1):
        subtitle = f"Run-ahead {run_ahead}, {NUM_CLIENTS} clients, {STAND_IN_MODELS} on a CPU."
        options = {"draft_options": _stand_in(DRAFT_MS), "verify_options": _stand_in(VERIFY_MS)}
        with tempfile.TemporaryDirectory() as folder:
            async with (
                observed_stack(
                    Path(folder), interval_ms=INTERVAL_MS, run_ahead=run_ahead, slots=NUM_CLIENTS, **options
                ) as observed,
                busy(observed.address, num_clients=NUM_CLIENTS, max_new_tokens=600),
            ):
                await asyncio.sleep(WARM_UP_S + seconds)
                name = f"overlap-run-ahead-{run_ahead}"
                means[name] = await _draw(observed.prometheus, OVERLAP, seconds, subtitle, pictures / f"{name}.png")
    with tempfile.TemporaryDirectory() as folder:
        subtitle = f"The bundled models on a CPU, {NUM_CLIENTS} clients for 4 slots."
        async with (
            observed_stack(Path(folder), interval_ms=INTERVAL_MS, slots=4) as observed,
            busy(observed.address, num_clients=NUM_CLIENTS, max_new_tokens=48),
        ):
            await asyncio.sleep(WARM_UP_S + seconds)
            for file in boards():
                if file != OVERLAP:
                    name = file.removeprefix("slipstream-").removesuffix(".json")
                    path = pictures / f"{name}.png"
                    means[name] = await _draw(observed.prometheus, file, seconds, subtitle, path)
    return means


def _stand_in(length_ms: float) -> tuple[str, ...]:
    return ("--stand-in-ms", f"{length_ms:g}")


async def _draw(
    prometheus: Prometheus, file: str, seconds: float, subtitle: str, path: Path
) -> dict[str, dict[str, float]]:
    """Draws one dashboard over the last `seconds`; returns the mean of each series, by panel and name."""
    board = boards()[file]
    end = time.time()
    results = [await _results(prometheus, panel, end - seconds, end) for panel in panels_of(board)]
    await asyncio.to_thread(draw_dashboard, board, subtitle, results, path)
    return {result.panel.title: result.means() for result in results if result.panel.kind not in ("table", "heatmap")}


async def _results(prometheus: Prometheus, panel: FoundPanel, start: float, end: float) -> PanelResult:
    found = [await _series(prometheus, query, start, end) for query in panel.queries]
    return PanelResult(panel, tuple(found))


async def _series(prometheus: Prometheus, query: FoundQuery, start: float, end: float) -> tuple[Series, ...]:
    return tuple(await prometheus.query_range(query.filled(RATE_INTERVAL), start, end, 1.0))


if __name__ == "__main__":
    typer.run(main)
