"""Every exception of the project.

    SlipstreamError
    ├── InvalidArgumentError        a request's field cannot be honoured
    ├── UnauthenticatedError        the call has no valid API key
    ├── NotFoundError               no such job
    ├── AlreadyExistsError          another request made a job of this name
    ├── ResourceExhaustedError      the queue is full; try again later
    ├── UnavailableError            a service that is needed is not there
    │   └── ConnectionLostError     no answer arrived; a job that was created may still go on
    ├── DeadlineExceededError       something took longer than it may
    ├── CancelledError              the caller, or the server as it stops, ended the work
    ├── FailedPreconditionError     the system is not in the state that this needs
    │   ├── DeviceError             a GPU failed, or cannot do what is needed
    │   ├── MismatchError           two services cannot work together; says what differs
    │   ├── StaleEpochError         a command belongs to an epoch that is over
    │   └── OutOfMemoryError        the device's memory is too small
    ├── ConfigError                 a setting of a service is wrong
    │   └── AddressInUseError       another process serves at this address
    ├── CheckpointError             a model directory cannot be served
    ├── ManifestError               a layout of shared memory cannot be trusted
    ├── OrderingError               the order of the steps, ours to guarantee, does not hold
    │   ├── PendingLengthError      a length that only the device knows was used as a number
    │   └── FutureMapError          a row was read too early or twice, or cannot be its step's result
    └── InternalError               a service failed; only its log has the reason

`status.py` maps them to gRPC status codes by one table.
"""

from __future__ import annotations

from typing import Self

RETRY_AFTER_MS = 500
"""Time after which a call that found a server full, or without its workers, may be repeated."""


class SlipstreamError(Exception):
    """Base of all errors that the project raises on purpose."""

    def again(self) -> Self:
        """The same error without a traceback, for one that is kept and ends several calls.

        Each time that an exception is raised, it keeps the frames that it passes, with all that they refer to.
        """
        error = type(self).__new__(type(self), *self.args)
        error.__dict__ |= self.__dict__
        return error


class InvalidArgumentError(SlipstreamError):
    """A field of a request cannot be honoured."""

    def __init__(self, field: str, given: object, accepted: str) -> None:
        """`field`: path of the field; `accepted`: the accepted values in words."""
        self.field = field
        self.description = f"got {shorten(given)}, accepted: {accepted}"
        super().__init__(f"{field}: {self.description}")

    @classmethod
    def described(cls, field: str, description: str) -> Self:
        """Makes the error from the parts that a client gets."""
        error = cls.__new__(cls)
        error.field = field
        error.description = description
        error.args = (f"{field}: {description}",)
        return error


class UnauthenticatedError(SlipstreamError):
    """The call has no API key, or none that the server knows."""


class NotFoundError(SlipstreamError):
    """There is no such job, or service, here."""


class AlreadyExistsError(SlipstreamError):
    """Another request made a job of this name."""


class ResourceExhaustedError(SlipstreamError):
    """A bound is reached; the same call may succeed later."""

    def __init__(self, message: str, *, retry_after_ms: int | None) -> None:
        """`retry_after_ms`: when the same call may succeed; None if it is not known that it ever does."""
        self.retry_after_ms = retry_after_ms
        super().__init__(message)


class UnavailableError(SlipstreamError):
    """A service that is needed is not there."""

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        """`retry_after_ms`: when the same call may succeed; None if it is not known to be safe to make it again."""
        self.retry_after_ms = retry_after_ms
        super().__init__(message)


class ConnectionLostError(UnavailableError):
    """No answer arrived, or no end of one: a job that was created may still go on."""


class DeadlineExceededError(SlipstreamError):
    """Something took longer than it may."""


class CancelledError(SlipstreamError):
    """The work was ended on request."""


class FailedPreconditionError(SlipstreamError):
    """The system is not in the state that this needs."""


class DeviceError(FailedPreconditionError):
    """A GPU failed, or cannot do what is needed."""

    def __init__(self, message: str, code: str = "") -> None:
        """`code`: the driver's name of the error, if it is one of the driver's."""
        self.code = code
        super().__init__(message)

    @property
    def is_lasting(self) -> bool:
        """True if the process's context is lost, so that all its other calls will fail as well."""
        return self.code in _LASTING or "_MPS_" in self.code


class MismatchError(FailedPreconditionError):
    """Two services cannot work together."""

    def __init__(self, differences: list[str]) -> None:
        """`differences` holds one sentence for each thing that differs."""
        self.differences = tuple(differences)
        super().__init__("; ".join(differences))


class StaleEpochError(FailedPreconditionError):
    """A command belongs to an epoch that is over."""


class OutOfMemoryError(FailedPreconditionError):
    """The device's memory is too small; the message says what takes how much of it."""


class ConfigError(SlipstreamError):
    """A setting is wrong: names the field, what was given and what is accepted."""

    def __init__(self, field: str, given: object, accepted: str) -> None:
        self.field = field
        super().__init__(f"{field}: got {shorten(given)}, accepted: {accepted}")


class AddressInUseError(ConfigError):
    """Another process serves at this address."""

    def __init__(self, field: str, address: str) -> None:
        super().__init__(field, address, "an address at which no other process serves")


class CheckpointError(SlipstreamError):
    """A model directory cannot be served; the message says what is supported."""

    def __init__(self, message: str) -> None:
        """Makes the message one printable line, as names in a checkpoint may have any characters."""
        super().__init__("".join(one if one.isprintable() else repr(one)[1:-1] for one in message))


class ManifestError(SlipstreamError):
    """A manifest of shared memory is out of bounds or contradicts itself."""


class OrderingError(SlipstreamError):
    """The order of the steps, which is ours to guarantee, does not hold."""


class PendingLengthError(OrderingError):
    """A length that only the device knows yet was used as a number, or changed by a step that is not its own."""


class FutureMapError(OrderingError):
    """A row of the FutureMap was consumed before it was published, or twice, or cannot be the step's result."""


class InternalError(SlipstreamError):
    """A service failed unexpectedly; its log has the traceback."""


_MAX_SHOWN = 120
"""Characters of a value in a message."""
_LASTING = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE", "INVALID_PC", "MISALIGNED_ADDRESS"),
        *("LAUNCH_FAILED", "LAUNCH_TIMEOUT", "HARDWARE_STACK_ERROR", "ASSERT", "CONTEXT_IS_DESTROYED"),
        *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "EXTERNAL_DEVICE"),
    )
)
"""The driver's names of errors after which a process's context is lost."""


def shorten(value: object) -> str:
    """Returns the beginning of a value's text; that of a million numbers takes no longer than that of a hundred."""
    text = repr(value[:_MAX_SHOWN] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
