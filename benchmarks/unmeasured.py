"""A service that measures nothing, to compare with.

    python -m slipstream.benchmarks.unmeasured scheduler|dummy_worker …

takes the arguments of that module. Only for `metrics_cost.py`: the services themselves have no such setting.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from slipstream.benchmarks.replaced_part import replace_part

SERVICES = {"scheduler": "slipstream.scheduler.main", "dummy_worker": "slipstream.benchmarks.dummy_worker"}


class Silent:
    """Stands for anything that measures: takes whatever it is told, and does nothing."""

    def __init__(self, *_: object, **given: object) -> None:
        # What the step metrics are asked for.
        self.labels = (given.get("fence"), given.get("mps"), given.get("algorithm"))

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _nothing(*_: object, **__: object) -> None:
    pass


REPLACED = {
    "scheduler": (
        ("slipstream.scheduler.workers.session", "StepMetrics", Silent),
        ("slipstream.scheduler.workers.session", "Heartbeats", Silent),
        ("slipstream.scheduler.workers.epoch", "StepTimings", Silent),
        ("slipstream.scheduler.server", "RequestMetrics", Silent),
        ("slipstream.scheduler.server", "RpcMetrics", Silent),
    ),
    "dummy_worker": (
        ("slipstream.services.worker.server", "RpcMetrics", Silent),
        ("slipstream.common.device.cpu.device", "HostDevice.stamp", _nothing),
    ),
}
"""By service: module, name in it, and what takes its place."""


def silence(service: str) -> None:
    """Takes the measuring out of this process."""
    for part in REPLACED[service]:
        replace_part(*part)


def main() -> None:
    """Entry point."""
    service = sys.argv.pop(1)
    silence(service)
    runpy.run_module(SERVICES[service], run_name="__main__")


if __name__ == "__main__":
    main()
