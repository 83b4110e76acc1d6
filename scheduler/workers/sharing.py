"""Checks that workers fit each other, and can share the device's memory with the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.device.manifest import EVENT
from slipstream.common.errors import MismatchError
from slipstream.common.host import pid_namespace, shm_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slipstream.common.device.interface import Device
    from slipstream.common.worker.contract import WorkerDescription


def check_fits(device: Device, verify: WorkerDescription, draft: WorkerDescription) -> None:
    """Raises MismatchError naming each thing in which a draft does not fit verify, or cannot share memory."""
    verify.check_fits(draft)
    if draft.hidden_width not in (0, verify.hidden_width):
        widths = f"draft reads {draft.hidden_width}, verify writes {verify.hidden_width}"
        raise MismatchError([f"width of the hidden states: {widths}"])
    check_sharing(device, [draft])


def check_sharing(device: Device, workers: Iterable[WorkerDescription]) -> None:
    """Checks that workers can share the device's memory with this process, before anything is shared.

    A handle that is opened in another PID namespace fails with an error that names another cause; an event in another
    /dev/shm does not fail at all, its waiter waits for ever. Raises MismatchError naming each difference and a remedy.
    """
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
    if device.fence_kind == EVENT and shm and worker.shm_device not in (0, shm):
        yield (
            f"/dev/shm: scheduler has device {shm}, {name} has {worker.shm_device}: event fences lie there "
            "(containers share it by `ipc:` in compose, by one volume in Kubernetes; --fence timeline needs none)"
        )
