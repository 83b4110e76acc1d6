"""What an epoch needs of the line to a worker, wherever the worker is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slipstream.common.errors import SlipstreamError
    from slipstream.common.worker.contract import Attachment, WorkerDescription
    from slipstream.common.worker.step import Role, StepCommand
    from slipstream.common.worker.trace import HostRecords


class Link(Protocol):
    """One worker, as its scheduler sees it. Called on the loop's thread."""

    @property
    def role(self) -> Role:
        """Which worker."""
        ...

    @property
    def failure(self) -> SlipstreamError | None:
        """Why the worker is lost; set at any time."""
        ...

    def describe(self) -> WorkerDescription:
        """Asks what the worker is. Raises UnavailableError if it is not there."""
        ...

    def attach(self, attachment: Attachment) -> None:
        """Opens an epoch. Raises FailedPreconditionError (and its kinds)."""
        ...

    def send(self, command: StepCommand) -> None:
        """Hands a command over and returns. Raises the link's failure."""
        ...

    def wait_for_acknowledgement(self, step: int, timeout_s: float) -> bool:
        """Blocks until the worker has acknowledged `step`; False if the time is over. Raises the link's failure."""
        ...

    def read_records(self, from_step: int) -> HostRecords | None:
        """What the worker recorded of steps from this one on; None if it tells nothing. Called on any thread."""
        ...

    def detach(self, *, drain: bool) -> None:
        """Ends the epoch; with `drain` the worker finishes what it was sent first."""
        ...
