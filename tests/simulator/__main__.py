"""Runs schedules again by their seeds, or counts the schedules after which planted bugs are found. See `__init__`."""

from __future__ import annotations

import sys
import time
from itertools import count

from tests.simulator.planted_bugs import BUGS
from tests.simulator.schedule import Schedule


def main(seeds: list[str]) -> None:
    """Prints what came of each seed; without any, what came of each planted bug."""
    for seed in map(int, seeds):
        schedule = Schedule(seed)
        print(schedule.run())
        print("\n".join(schedule.world.notes))
    for bug in () if seeds else BUGS:
        begun = time.monotonic()
        number, seed, verdict = bug.find(count())
        seconds = time.monotonic() - begun
        print(f"{bug.name}: after {number} schedules, {seconds:.1f} s. {verdict.splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
