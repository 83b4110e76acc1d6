"""A scheduler that sends late at times and marks its steps, for `step_check.py`: the real one, but for these two.

    python -m slipstream.benchmarks.delayed_scheduler PLAN MARKS …

takes the options of `slipstream-scheduler`. MARKS is the file to write.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from slipstream.benchmarks.delayed_dispatch import delayed_loop
from slipstream.benchmarks.delayed_plan import DelayPlan
from slipstream.benchmarks.replaced_part import replace_part
from slipstream.benchmarks.step_check_marks import MarkingMetrics, Marks, TimedResults
from slipstream.scheduler.main import main as scheduler_main


def main() -> None:
    """Entry point."""
    plan, marks_file = DelayPlan.read(Path(sys.argv.pop(1))), Path(sys.argv.pop(1))
    with marks_file.open("w", encoding="utf-8") as file:
        marks = Marks(plan, file)
        replace_part("slipstream.scheduler.workers.epoch", "StepLoop", delayed_loop(plan))
        replace_part("slipstream.scheduler.workers.epoch", "ResultReader", partial(TimedResults, marks))
        replace_part("slipstream.scheduler.workers.session", "StepMetrics", partial(MarkingMetrics, marks))
        scheduler_main()


if __name__ == "__main__":
    main()
