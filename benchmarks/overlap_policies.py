"""The ways of ordering steps that `overlap.py` compares, from the one that loses most to the one that is served with.

They are those that SGLang's scheduler went through. The plan of waits and signals is the same in all; what differs is
what the host waits for, and when it reads a step's lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_BLOCKS = "host_blocks"
"""A worker acknowledges a step when its work is done, and every command waits for what it depends on."""
WHOLE_STEP = "whole_step"
"""Streams wait for each other; the scheduler reads lengths on its main stream, behind all of a step's work."""
MAIN_STREAM = "main_stream"
"""Behind what is published, but still on the main stream: there the next step's work is queued before it."""
PRIVATE_STREAM = "run_ahead"
"""Behind what is published, on a stream of its own: what is served with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How steps are ordered."""

    name: str
    run_ahead: int
    fence: str = "auto"
    """On a GPU: timeline or event."""
    has_mps: bool = False

    @property
    def is_blocking(self) -> bool:
        """Whether workers acknowledge what is done, not what is enqueued."""
        return self.name == HOST_BLOCKS

    @property
    def is_served_with(self) -> bool:
        """Whether the product's own scheduler does this."""
        return self.name in (HOST_BLOCKS, PRIVATE_STREAM)

    @property
    def title(self) -> str:
        """For people."""
        name = {
            HOST_BLOCKS: "host blocks",
            WHOLE_STEP: "reads after the step",
            MAIN_STREAM: "reads on main stream",
            PRIVATE_STREAM: f"run-ahead {self.run_ahead}",
        }[self.name]
        return name if self.fence in ("auto", "timeline") else f"{name}, {self.fence}"


def policies_of(device: str) -> tuple[Policy, ...]:
    """What is compared on a CPU or on a GPU."""
    if device == "cpu":
        return (
            Policy(name=HOST_BLOCKS, run_ahead=0),
            *(Policy(name=PRIVATE_STREAM, run_ahead=run_ahead) for run_ahead in range(3)),
        )
    timeline, event = "timeline", "event"
    return (
        Policy(name=HOST_BLOCKS, run_ahead=0, fence=timeline, has_mps=True),
        Policy(name=WHOLE_STEP, run_ahead=0, fence=timeline, has_mps=True),
        Policy(name=MAIN_STREAM, run_ahead=1, fence=timeline, has_mps=True),
        *(Policy(name=PRIVATE_STREAM, run_ahead=ahead, fence=timeline, has_mps=True) for ahead in range(4)),
        *(Policy(name=PRIVATE_STREAM, run_ahead=ahead, fence=event, has_mps=True) for ahead in (1, 2)),
        Policy(name=HOST_BLOCKS, run_ahead=0, fence=timeline),
        *(Policy(name=PRIVATE_STREAM, run_ahead=ahead, fence=timeline) for ahead in (1, 2)),
        Policy(name=PRIVATE_STREAM, run_ahead=1, fence=event),
    )
