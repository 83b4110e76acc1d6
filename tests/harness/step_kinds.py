"""What steps and commands do, in a word, for tests that count and compare them."""

from __future__ import annotations

import enum

from slipstream.common.wire.step import StepCommand
from slipstream.scheduler.records import Step


class Kind(enum.Enum):
    """What a step does. With chunks, DECODE and PLAIN take in prompts as well."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Draft has a decode part."""
    PLAIN = "plain"
    CATCH_UP = "catch up"


def kind_of_step(step: Step) -> Kind:
    """What a step of the scheduler does."""
    if step.is_prefill:
        return Kind.PREFILL
    return Kind.DECODE if step.is_kept else Kind.PLAIN


def kind_to_draft(command: StepCommand) -> Kind:
    """What a draft's command does."""
    if command.catches_up:
        return Kind.CATCH_UP
    return Kind.DECODE if command.slots else Kind.PREFILL
