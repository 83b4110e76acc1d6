"""Checks that workers fit each other, and can share the device's memory with the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.errors import FailedPreconditionError, MismatchError
from slipstream.common.host import pid_namespace, shm_device
from slipstream.common.wire.manifest import EVENT
from slipstream.common.wire.step import Role
from slipstream.scheduler.workers.sizing import check_draft_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.scheduler.records import DraftTarget
    from slipstream.scheduler.workers.attachment import Retired
    from slipstream.scheduler.workers.epoch import Epoch


def check_fits(device: Device, verify: WorkerDescription, draft: WorkerDescription) -> None:
    """Raises MismatchError naming each thing in which a draft does not fit verify, or cannot share memory."""
    verify.check_fits(draft)
    # Verify itself checks a draft that names the layers that it reads.
    if not draft.hidden_layers and draft.hidden_width not in (0, verify.hidden_width):
        widths = f"draft reads {draft.hidden_width}, verify writes {verify.hidden_width}"
        raise MismatchError([f"width of the hidden states: {widths}"])
    if draft.shared_weight_bytes and verify.weights is None:
        raise MismatchError(["weights: draft borrows verify's, which lends none (both need --share-weights)"])
    check_sharing(device, [draft])


def check_sharing(device: Device, workers: Iterable[WorkerDescription]) -> None:
    """Checks that workers speak this scheduler's contract, and can share the device's memory with it, before they do.

    A handle that is opened in another PID namespace fails with an error that names another cause; an event in another
    /dev/shm does not fail at all, its waiter waits for ever. Raises MismatchError naming each difference and a remedy.
    """
    workers = list(workers)
    for worker in workers:
        worker.check_version()
    differences = [text for worker in workers for text in _differences(device, worker)]
    if differences:
        raise MismatchError(differences)


def _differences(device: Device, worker: WorkerDescription) -> Iterator[str]:
    """Compares what both sides know."""
    name = worker.role.value
    if worker.device != device.identity:
        is_one_on_cpu = "cpu" in (worker.device, device.identity)
        remedy = "--device" if is_one_on_cpu else "CUDA_VISIBLE_DEVICES"
        found = f"device: scheduler has {device.identity!r}, {name} has {worker.device!r}"
        yield f"{found} (start all services with the same {remedy})"
        return
    if device.identity == "cpu":
        return
    own = pid_namespace()
    if own and worker.pid_namespace not in ("", own):
        yield (
            f"PID namespace: scheduler has {own}, {name} has {worker.pid_namespace}: CUDA shares memory within one "
            "(containers share one by `pid:` in compose, by shareProcessNamespace in Kubernetes)"
        )
    shm = shm_device()
    what_lies_there = ["results"] * (worker.role is Role.VERIFY) + ["event fences"] * (device.fence_kind == EVENT)
    if what_lies_there and shm and worker.shm_device not in (0, shm):
        yield (
            f"/dev/shm: scheduler has device {shm}, {name} has {worker.shm_device}: {' and '.join(what_lies_there)} "
            "lie there (containers share it by `ipc:` in compose, by one volume in Kubernetes)"
        )


MOST_OF_A_DRAFT = {"last_epoch": 2**62 - 1, "tokens_ahead": 64}
"""Numbers of a draft's description that others depend on. Those of epochs must fit the 64 bits of messages and fences;
the pages of a prompt's last `tokens_ahead` tokens are not shared while the draft takes part."""


class Admission:
    """Checks a draft before anything is attached. Belongs to the thread of the draft's session."""

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
        for name, most in MOST_OF_A_DRAFT.items():
            if (value := getattr(draft, name)) > most:
                raise FailedPreconditionError(f"{name} of the draft service: got {value}, accepted: at most {most}")
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
