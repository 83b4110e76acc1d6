"""Attachments that are over, and whose memory a living draft may still write to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.common.errors import FailedPreconditionError
from slipstream.scheduler.workers.attachment import Retired


class Held:
    """An attachment of a process that lives."""

    is_superseded = was_taken = False

    def __init__(self, pid: int) -> None:
        self.description: Any = SimpleNamespace(pid=pid)
        self.is_closed = False

    @property
    def is_gone(self) -> bool:
        """See `DraftAttachment.is_gone`."""
        return self.is_superseded

    def close(self) -> None:
        """See `DraftAttachment.close`."""
        self.is_closed = True


def test_a_process_may_come_back_to_what_it_left_and_a_third_may_not() -> None:
    """Two living drafts that were lost must not keep each other away for ever."""
    retired, first, second = Retired(), Held(1), Held(2)
    retired.add(first)  # type: ignore[arg-type]
    retired.add(second)  # type: ignore[arg-type]
    retired.add(Held(2))  # type: ignore[arg-type]
    with pytest.raises(FailedPreconditionError, match="2 earlier draft processes"):
        retired.check(3)
    retired.check(1)
    again = Held(1)
    retired.supersede(again)  # type: ignore[arg-type]
    assert not first.is_closed, "its process may have taken nothing"
    again.was_taken = True
    retired.supersede(again)  # type: ignore[arg-type]
    assert (first.is_closed, second.is_closed) == (True, False)
    retired.check(3)
