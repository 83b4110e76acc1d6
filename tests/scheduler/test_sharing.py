"""Workers that cannot share a GPU's memory with the scheduler are told so by name, before anything is shared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.errors import MismatchError
from slipstream.common.host import pid_namespace, shm_device
from slipstream.common.wire.manifest import EVENT, TIMELINE
from slipstream.common.wire.step import PROTOCOL_VERSION, Role
from slipstream.common.wire.worker import WorkerDescription
from slipstream.scheduler.attachment import check_sharing
from tests.harness.checkpoints import write_checkpoint
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session
from tests.harness.workers import describe

GPU, OTHER_GPU = "GPU-7d9b2c3e", "GPU-00000001"
HERE = {"device": GPU, "pid_namespace": pid_namespace(), "shm_device": shm_device()}
ELSEWHERE = "pid:[1]"


def gpu(fence_kind: str = TIMELINE) -> Device:
    """The scheduler's."""
    return cast("Device", SimpleNamespace(identity=GPU, fence_kind=fence_kind))


def workers(
    *, verify: dict[str, object] | None = None, draft: dict[str, object] | None = None
) -> list[WorkerDescription]:
    """Both beside the scheduler, but for what is given."""
    return [describe(Role.VERIFY, **(HERE | (verify or {}))), describe(Role.DRAFT, **(HERE | (draft or {})))]


def said(device: Device, found: list[WorkerDescription]) -> tuple[str, ...]:
    """The differences."""
    with pytest.raises(MismatchError) as caught:
        check_sharing(device, found)
    return caught.value.differences


def test_this_kernel_says_both() -> None:
    assert pid_namespace().startswith("pid:[")
    assert shm_device() > 0


@pytest.mark.parametrize("fence_kind", [TIMELINE, EVENT])
def test_workers_beside_the_scheduler_fit(fence_kind: str) -> None:
    check_sharing(gpu(fence_kind), workers())
    check_sharing(gpu(fence_kind), workers()[:1])


@pytest.mark.parametrize("role", [Role.VERIFY, Role.DRAFT])
def test_a_worker_of_another_version_of_the_contract_is_refused(role: Role) -> None:
    version = {"protocol_version": PROTOCOL_VERSION - 1}
    spoken = f"{role.value} speaks {PROTOCOL_VERSION - 1}, this scheduler {PROTOCOL_VERSION}"
    expected = f"protocol version: {spoken} (run the same release of both)"
    assert said(HostDevice(), workers(**{role.value: version})) == (expected,)


def test_another_gpu_is_told_apart_by_its_uuid() -> None:
    (difference,) = said(gpu(), workers(draft={"device": OTHER_GPU}))
    assert difference.startswith(f"device: scheduler has '{GPU}', draft has '{OTHER_GPU}' (start ")
    assert difference.endswith("with the same CUDA_VISIBLE_DEVICES)")
    assert len(said(gpu(), workers(verify={"device": OTHER_GPU}, draft={"device": OTHER_GPU}))) == 2


def test_a_worker_on_the_cpu_is_told_from_one_on_a_gpu() -> None:
    (difference,) = said(gpu(), workers(verify={"device": "cpu"}))
    assert "verify has 'cpu' (start all services with the same --device)" in difference
    (difference,) = said(HostDevice(), workers(draft={"device": "cpu"}))
    assert f"scheduler has 'cpu', verify has '{GPU}'" in difference


@pytest.mark.parametrize("fence_kind", [TIMELINE, EVENT])
def test_another_pid_namespace_is_refused_with_the_remedy(fence_kind: str) -> None:
    (difference,) = said(gpu(fence_kind), workers(verify={"pid_namespace": ELSEWHERE}))
    assert f"PID namespace: scheduler has {pid_namespace()}, verify has {ELSEWHERE}" in difference
    assert "shareProcessNamespace" in difference


def test_another_shm_is_refused_where_something_shared_lies_there() -> None:
    there = {"shm_device": shm_device() + 1}
    (difference,) = said(gpu(EVENT), workers(draft=there))
    assert (
        f"/dev/shm: scheduler has device {shm_device()}, draft has {shm_device() + 1}: event fences lie" in difference
    )
    check_sharing(gpu(TIMELINE), workers(draft=there))
    for fence_kind, what in ((TIMELINE, "results"), (EVENT, "results and event fences")):
        (difference,) = said(gpu(fence_kind), workers(verify=there))
        assert f"verify has {shm_device() + 1}: {what} lie there" in difference


def test_what_a_worker_does_not_say_is_not_held_against_it() -> None:
    unknown: dict[str, object] = {"pid_namespace": "", "shm_device": 0}
    check_sharing(gpu(EVENT), workers(verify=unknown, draft=unknown))


def test_on_a_cpu_namespaces_do_not_matter() -> None:
    on_cpu = {"device": "cpu", "pid_namespace": ELSEWHERE, "shm_device": 1}
    check_sharing(HostDevice(), workers(verify=on_cpu, draft=on_cpu))


class ElsewhereDevice(HostDevice):
    """A scheduler's device that no worker has."""

    identity = OTHER_GPU


async def test_a_scheduler_ends_with_the_reason(tmp_path: Path) -> None:
    """Over the wire, with a real worker: there is no other try, and nobody waits for one."""
    models = {Role.VERIFY: write_checkpoint(tmp_path / "model")}
    with WorkerProcesses(tmp_path, models, dummy_ms=0) as processes:
        processes.start(Role.VERIFY)
        with running_session(processes, device=ElsewhereDevice(), has_draft=False) as client:
            await until(lambda: bool(client.errors))
            assert f"scheduler has '{OTHER_GPU}', verify has 'cpu'" in str(client.errors[0])
            assert isinstance(client.errors[0], MismatchError)
        assert processes.end() == [0]
