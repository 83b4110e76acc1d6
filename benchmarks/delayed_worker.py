"""A worker that signals late at times, for `step_check.py`: the real one, but for its engine.

    python -m slipstream.benchmarks.delayed_worker draft|verify PLAN …

takes the options of `slipstream-draft` or `slipstream-verify`.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from slipstream.benchmarks.delayed_engine import DelayedEngine
from slipstream.benchmarks.replaced_part import replace_part


def main() -> None:
    """Entry point."""
    role, plan_file = sys.argv.pop(1), Path(sys.argv.pop(1))
    replace_part("slipstream.services.worker.server", "Engine", partial(DelayedEngine, plan_file))
    import_module(f"slipstream.services.{role}.main").main()


if __name__ == "__main__":
    main()
