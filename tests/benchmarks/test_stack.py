"""The services of a benchmark: they do not outlive it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.harness.waiting import block_until, runs

FAKE_SERVICE = Path(__file__).parents[1] / "harness" / "fake_service.py"
BENCHMARK = f"""
import asyncio, sys
from pathlib import Path
from slipstream.benchmarks.stack import Stack

async def main():
    async with Stack(log_dir=None) as stack:
        address = stack.socket("fake")
        Path(address.removeprefix("unix:")).parent.mkdir()
        await stack.process("fake", sys.executable, {str(FAKE_SERVICE)!r}, "--listen", address)
        print("serving", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_services_of_a_benchmark_that_is_killed_die_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BENCHMARK], stdout=subprocess.PIPE, text=True) as benchmark:
        try:
            assert benchmark.stdout is not None
            while (line := benchmark.stdout.readline()) != "serving\n":
                assert line, "the service does not serve"
            (service,) = psutil.Process(benchmark.pid).children()
        finally:
            benchmark.kill()
    try:
        block_until(lambda: not runs(service))
    finally:
        if service.is_running():
            service.kill()
