"""Whether the workers can share a device's memory with this process: found out before anything is shared.

A handle that is opened across one of these borders fails with an error that names another cause, or, as an event's
does, not at all: whoever waits for it waits for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.device.manifest import EVENT
from slipstream.common.errors import MismatchError
from slipstream.common.host import pid_namespace, shm_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.common.device.interface import Device
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.scheduler.workers.sizing import Workers

CPU = "cpu"


def check_sharing(device: Device, workers: Workers) -> None:
    """Raises MismatchError that says for each worker what is not the scheduler's, and what to do about it."""
    differences = [text for worker in workers.all for text in _differences(device, worker)]
    if differences:
        raise MismatchError(differences)


def _differences(device: Device, worker: WorkerDescription) -> Iterator[str]:
    """What is not known is not compared."""
    name = worker.role.value
    if worker.device != device.identity:
        is_one_on_cpu = CPU in (worker.device, device.identity)
        remedy = "--device" if is_one_on_cpu else "CUDA_VISIBLE_DEVICES"
        found = f"device: scheduler has {device.identity!r}, {name} has {worker.device!r}"
        yield f"{found} (start all services with the same {remedy})"
        return
    if device.identity == CPU:
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
