"""Which steps are delayed, and where: known to workers and scheduler alike from the step's number alone.

Blocks of steps with and without a delay take turns, so that whatever else happens to the machine happens to both.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Late(enum.StrEnum):
    """What is late in a block of steps. A step is late if its own bubble is what grows."""

    NOTHING = "nothing"
    STASH = "stash"
    """Verify's stream, between the end stamp of the step before and the signal of its stash."""
    DONE = "done"
    """Draft's stream, between the end stamp of the step and the signal of its done."""
    FIRST_HELD = "first_held"
    """Nothing, but the step's first command is held for `HOLD_S`: what `FIRST_LATER` is compared with."""
    FIRST_LATER = "first_later"
    """The scheduler's thread, behind that and before it sends the command."""
    VERIFY_HELD = "verify_held"
    """Nothing, but the step's first command is held for `HOLD_S`, and verify's until draft is done and as long again:
    what `VERIFY_LATER` is compared with. In steps without a draft the same as `FIRST_HELD`."""
    VERIFY_LATER = "verify_later"
    """The scheduler's thread, behind that and before it sends verify's command. Without a draft as `FIRST_LATER`."""

    def in_step(self, *, is_plain: bool) -> Late:
        """The same by its own name for a step without a draft, whose first command is verify's."""
        return _IN_PLAIN.get(self, self) if is_plain else self


_IN_PLAIN = {Late.VERIFY_HELD: Late.FIRST_HELD, Late.VERIFY_LATER: Late.FIRST_LATER}


HOLD_S = 0.002
"""In this time the scheduler's other threads are through with the step before, and no delay can hide behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayPlan:
    """The turns that blocks of steps take."""

    delay_us: float
    first_step: int
    """Nothing is late before."""
    block_steps: int
    cycle: tuple[Late, ...]

    def at(self, step: int) -> Late:
        """What is late for the bubbles of a step."""
        if step < self.first_step:
            return Late.NOTHING
        return self.cycle[(step - self.first_step) // self.block_steps % len(self.cycle)]

    def ends_block(self, step: int) -> bool:
        """Whether a block ends with this step; so it does, in the same rhythm, before the first that is late."""
        return (step + 1 - self.first_step) % self.block_steps == 0

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> DelayPlan:
        """What `write` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**fields | {"cycle": tuple(Late(name) for name in fields["cycle"])})
