"""Attachments that are over, and whose memory a living draft may still write to."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import FailedPreconditionError
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import RESULT_FENCES, DraftShape, EpochShape
from slipstream.common.wire.step import Role
from slipstream.common.wire.worker import Attachment
from slipstream.scheduler.attachment import MOST_OF_ONE, DraftAttachment, Mapping, Retired
from tests.harness.workers import describe


class Held:
    """An attachment of a process that lives."""

    mapping = Mapping.ASKED

    def __init__(self, pid: int) -> None:
        self.description: Any = SimpleNamespace(pid=pid)
        self.is_closed = False

    @property
    def is_gone(self) -> bool:
        """See `DraftAttachment.is_gone`."""
        return self.mapping is Mapping.RELEASED

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
    again.mapping = Mapping.TAKEN
    retired.supersede(again)  # type: ignore[arg-type]
    assert (first.is_closed, second.is_closed) == (True, False)
    retired.check(3)


def test_a_process_that_was_attached_too_often_has_to_be_started_again() -> None:
    retired = Retired()
    for _ in range(MOST_OF_ONE):
        retired.check(1)
        retired.add(Held(1))  # type: ignore[arg-type]
    with pytest.raises(FailedPreconditionError, match="has to be started again"):
        retired.check(1)
    retired.check(2)


@pytest.mark.parametrize(("kind", "is_given_back"), [("cpu", True), ("cuda", False)])
def test_memory_of_a_gpu_is_kept_until_the_process_has_ended(kind: str, *, is_given_back: bool) -> None:
    """A hostile draft may go on to write to all that it ever mapped, whatever it answers."""
    device = HostDevice()
    device.torch_device = torch.device(kind)  # the memory is the CPU's in any case
    process = subprocess.Popen(["sleep", "60"])
    shape = DraftShape(num_slots=2, run_ahead=0, num_draft_tokens=1, chunk_tokens=1)
    link: Any = SimpleNamespace(attach=lambda _: None, detach=lambda drain: drain)
    verify: Any = SimpleNamespace(attach_region=lambda _: None, detach_draft=lambda *_: None)
    draft = replace(describe(Role.DRAFT), pid=process.pid)
    attachment = DraftAttachment(2, link, draft, shape, device, epoch=1, log=EventLog())
    try:
        attachment.attach(_attachment(device), verify, describe(Role.VERIFY))
        attachment.detach(verify, drain=True)
        assert attachment.is_gone is is_given_back
    finally:
        process.kill()
        process.wait()
    assert attachment.is_gone
    attachment.close()


def _attachment(device: HostDevice) -> Attachment:
    shape = EpochShape(num_slots=2, run_ahead=0, num_draft_tokens=1, chunk_tokens=1)
    results = device.create_arena(shape.specs(), RESULT_FENCES)
    manifest = results.manifest
    results.close()
    return Attachment(
        epoch=1, manifest=manifest, shape=shape, page_tokens=16, num_pages=2, slot_pages=1, context_tokens=16
    )
