"""Checks of a draft before anything is attached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.errors import FailedPreconditionError, MismatchError
from slipstream.scheduler.workers.sharing import check_fits
from slipstream.scheduler.workers.sizing import check_draft_memory

if TYPE_CHECKING:
    from slipstream.common.device.interface import Device
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.scheduler.workers.attachment import Retired
    from slipstream.scheduler.workers.epoch import Epoch
    from slipstream.scheduler.workers.held import DraftTarget

MOST_EPOCHS = 2**62
"""Numbers of epochs are below it: they only grow, and must fit the 64 bits of the messages and of the fences."""


class Admission:
    """Belongs to the thread of the draft's session."""

    def __init__(self, device: Device, retired: Retired) -> None:
        self._device = device
        self._retired = retired
        self._misfit: tuple[object, list[str]] | None = None
        """A draft that was found not to fit, as `_key` tells it from others, and what differs."""

    def check(self, epoch: Epoch, draft: WorkerDescription, target: DraftTarget) -> None:
        """Raises FailedPreconditionError (and its kinds) if the draft cannot be attached to the epoch."""
        if self._misfit is not None and self._misfit[0] == self._key(epoch, draft, target):
            raise MismatchError(self._misfit[1])
        if draft.has_scheduler:
            raise FailedPreconditionError("the draft service has another scheduler")
        if draft.last_epoch >= MOST_EPOCHS:
            raise FailedPreconditionError(f"last_epoch of the draft service: {draft.last_epoch} is no epoch's number")
        self._retired.check(draft.pid)
        try:
            check_fits(self._device, epoch.verify, draft)
        except MismatchError as error:
            self.refuse(epoch, draft, target, error)
            raise
        check_draft_memory(draft, epoch.sizes)

    def refuse(self, epoch: Epoch, draft: WorkerDescription, target: DraftTarget, error: object) -> None:
        """Has `check` refuse the same process for this epoch and number of draft tokens, if `error` is a mismatch."""
        if isinstance(error, MismatchError):
            self._misfit = self._key(epoch, draft, target), list(error.differences)

    @staticmethod
    def _key(epoch: Epoch, draft: WorkerDescription, target: DraftTarget) -> object:
        return target, draft.pid, epoch.number
