"""A worker that signals late at times, for `step_check.py`: the real one, but for its engine.

    python -m slipstream.benchmarks.delayed_worker PLAN MODULE …

takes the arguments of MODULE, which serves a worker.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

from slipstream.benchmarks.delayed_engine import DelayedEngine
from slipstream.benchmarks.replaced_part import replace_part


def main() -> None:
    """Entry point."""
    plan_file, module = Path(sys.argv.pop(1)), sys.argv.pop(1)
    replace_part("slipstream.services.worker.server", "Engine", partial(DelayedEngine, plan_file))
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
