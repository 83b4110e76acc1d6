"""Checks of a host: what the services need of it, its GPU, the models, and memory that two processes share."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import json
import math
import os
import re
import resource
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import httpx
import torch

from slipstream.cli.hand_over import TIMED, WORDS, measure
from slipstream.cli.health import check
from slipstream.cli.models import describe_draft, describe_target
from slipstream.cli.mps import MpsMode, has_nvidia_device, mps_daemon, outside_mps
from slipstream.cli.up_config import IN_ORDER_OF_PORTS, LOOPBACK
from slipstream.common.device.choose import CPU, CUDA, cuda_obstacle
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES, TcpAddress, parse_address
from slipstream.common.wire.manifest import EVENT, TIMELINE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from slipstream.cli.hand_over import HandOver
    from slipstream.cli.models import ModelChoice

MIB = 1 << 20
FEWEST_SHM_BYTES, ENOUGH_SHM_BYTES = 32 * MIB, 512 * MIB
FEWEST_DESCRIPTORS, ENOUGH_DESCRIPTORS = 256, 4096
_DESCRIPTORS = resource.RLIMIT_NOFILE
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The kernel's fixed names of a host's first namespaces."""
_LONGEST_SOCKET = "sockets/scheduler.sock"
_DRIVER = Path("/proc/driver/nvidia/version")
_WITHOUT = "none needed with --device cpu; for a GPU, install NVIDIA's driver (in containers, its container toolkit)"
_OUR_METRIC = "slipstream_"
_METRICS_S = 2.0
STEPS_MS = (1.0, 5.0)
GOOD_OVERLAP = 0.95
_SAME_NAMESPACES = "run as one user, with the same /dev/shm, PID and IPC namespaces"
_MPS_REMEDY = "without MPS a hand-over costs about 0.14 ms; start with --mps off, or make it run"


class Verdict(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Works, with a drawback."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what is there, and a remedy unless all is well."""

    verdict: Verdict
    name: str
    detail: str
    remedy: str = ""


ok, note, failed = (partial(Finding, verdict) for verdict in (Verdict.OK, Verdict.NOTE, Verdict.FAILED))
_MARKS = {Verdict.OK: "✓", Verdict.NOTE: "!", Verdict.FAILED: "✗"}


async def run_doctor(
    models: ModelChoice, device: str, listen: str, metrics_port: int, state_dir: Path, *, as_json: bool
) -> int:
    """Prints each finding at once, or all as one JSON object; returns 1 if anything failed."""
    # Before anything asks for the GPU: like the scheduler, this process owns the memory that two others share.
    os.environ.update(outside_mps(state_dir))
    findings = []
    async for finding in examine(models, device, listen, metrics_port, state_dir):
        findings.append(finding)
        if not as_json:
            print(f"{_MARKS[finding.verdict]} {finding.name}: {finding.detail}", flush=True)
            if finding.remedy:
                print(f"    → {finding.remedy}", flush=True)
    has_failed = any(finding.verdict is Verdict.FAILED for finding in findings)
    if as_json:
        print(json.dumps({"ok": not has_failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        print("\nThis host cannot serve as it is." if has_failed else "\nThis host can serve.")
    return 1 if has_failed else 0


async def examine(
    models: ModelChoice, device: str, listen: str, metrics_port: int, state_dir: Path
) -> AsyncIterator[Finding]:
    """Yields the findings in order. `device`: "auto" asks for a GPU only where there is one.

    `metrics_port`: of the scheduler; those of the other services follow. 0: any free ones.
    """
    if device != CPU:
        yield check_driver(is_needed=device == CUDA)
        yield check_cuda(is_needed=device == CUDA)
    yield check_shm()
    yield check_descriptors()
    yield check_namespaces()
    yield check_state_dir(state_dir)
    yield await check_port("clients", listen)
    for number, service in enumerate(IN_ORDER_OF_PORTS if metrics_port else ()):
        if service != "door":  # which `up` starts only by an option that is not asked for here
            yield await check_port(f"metrics of {service}", f"{LOOPBACK}:{metrics_port + number}")
    for finding in check_models(models):
        yield finding
    if device == CPU or (device != CUDA and cuda_obstacle() is not None):
        for finding in check_sharing_on_cpu():
            yield finding
    elif cuda_obstacle() is None:
        for finding in await check_sharing_on_gpu():
            yield finding
        yield check_gpu()
        if torch.cuda.device_count() > 1:
            yield check_links()


def check_shm(directory: Path = Path("/dev/shm")) -> Finding:
    """Checks the room for results, and for arenas of the CPU backend; CUDA keeps event handles there too."""
    name = f"shared memory {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return failed(name, "this user cannot write there", "mount a tmpfs there with mode 1777")
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    remedy = "a larger /dev/shm (in containers --shm-size, here 1 GiB), or remove what lies there"
    return _by_amount(name, f"{free / MIB:.0f} MiB free", remedy, free, FEWEST_SHM_BYTES, ENOUGH_SHM_BYTES)


def check_descriptors() -> Finding:
    """Checks the limit of file descriptors: each connection and each metrics scrape takes one."""
    limits = [math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_DESCRIPTORS)]
    soft, hard = ("any number" if limit == math.inf else f"{limit}" for limit in limits)
    remedy = f"raise it: ulimit -n {ENOUGH_DESCRIPTORS}, LimitNOFILE=, or ulimits: nofile"
    detail = f"{soft} may be open (at most {hard})"
    return _by_amount("descriptors", detail, remedy, limits[0], FEWEST_DESCRIPTORS, ENOUGH_DESCRIPTORS)


def _by_amount(name: str, detail: str, remedy: str, found: float, fewest: int, enough: int) -> Finding:
    if found >= enough:
        return ok(name, detail)
    return (failed if found < fewest else note)(name, detail, remedy)


def check_namespaces() -> Finding:
    """Checks the PID and IPC namespaces, which scheduler, draft and verify must share for CUDA IPC."""
    here = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _FIRST_NAMESPACES}
    detail = ", ".join(here.values())
    if here == _FIRST_NAMESPACES:
        return ok("namespaces", f"{detail}: the host's own")
    return note("namespaces", f"{detail}: a container's", "all services must join these, as in compose.yaml")


def check_state_dir(path: Path) -> Finding:
    """Checks the directory where `up` keeps sockets and logs."""
    name = f"state directory {path}"
    longest = len(os.fsencode(path.absolute() / _LONGEST_SOCKET))
    if longest > MAX_UNIX_PATH_BYTES:
        return failed(name, f"its sockets' names have {longest} bytes", "a shorter one: --state-dir")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failed(name, f"this user cannot write to {there}", "another one: --state-dir")
    if there != path.absolute():
        return ok(name, "will be made, for this user only")
    status = there.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        remedy = f"chown it to this user and chmod 700 {path}: who can open a worker's socket can drive it"
        return failed(name, f"owner {status.st_uid}, mode {mode:o}", remedy)
    return ok(name, f"only for this user (mode {mode:o})")


async def check_port(what: str, address: str) -> Finding:
    """Checks an address to listen at: free, taken by a server of ours, or by another program."""
    name = f"port for {what}"
    parsed = parse_address(address, field="listen")
    if not isinstance(parsed, TcpAddress):
        return ok(name, f"{address}: a Unix socket")
    try:
        family = socket.AF_INET6 if ":" in parsed.host else socket.AF_INET
        with socket.create_server((parsed.host, parsed.port), family=family):
            return ok(name, f"{address} is free")
    except OSError as error:
        reason = error.strerror or str(error)
    if await asyncio.to_thread(_has_our_metrics, parsed):
        return note(name, f"a service's metrics are at {address} already", "one at a time, or --metrics-port")
    try:
        found = f"a service is at {address} already: {await check(str(parsed))}"
        return note(name, found, "one at a time, or --listen")
    except UnavailableError:
        return failed(name, f"{address}: {reason}", "end who has it, or take another port")


def _has_our_metrics(address: TcpAddress) -> bool:
    host = f"[{address.host}]" if ":" in address.host else address.host
    with suppress(httpx.HTTPError), httpx.Client(timeout=_METRICS_S, trust_env=False) as client:
        text = client.get(f"http://{host}:{address.port}/metrics").text
        return any(line.startswith(_OUR_METRIC) for line in text.splitlines())
    return False


def check_driver(*, is_needed: bool) -> Finding:
    """Checks NVIDIA's kernel driver and its library."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        where = "a GPU, but no libcuda.so.1" if has_nvidia_device() else "no GPU and no driver here"
        return failed("driver", where, _WITHOUT) if is_needed else note("driver", where, _WITHOUT)
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return failed("driver", "libcuda.so.1 does not answer", "install the driver again, and restart the host")
    found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
    kernel = found[0] if found else "of unknown version"
    return ok("driver", f"{kernel}, for CUDA up to {version.value // 1000}.{version.value % 1000 // 10}")


def check_cuda(*, is_needed: bool) -> Finding:
    """Checks PyTorch's CUDA and the bindings."""
    obstacle = cuda_obstacle()
    detail = f"PyTorch {torch.__version__}"
    if obstacle is None:
        return ok("CUDA", f"{detail}, CUDA {torch.version.cuda}, cuda-bindings")
    return failed("CUDA", detail, obstacle) if is_needed else note("CUDA", f"{detail}: on the CPU", obstacle)


def check_gpu() -> Finding:
    """Checks the first GPU that this process sees."""
    gpu = torch.cuda.get_device_properties(0)
    free, total = (size >> 30 for size in torch.cuda.mem_get_info(0))
    detail = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {free} of {total} GiB free"
    if gpu.major < 8:
        return note("GPU", detail, "bfloat16 needs 8.0: start with --dtype float16 or float32")
    if free * 10 < total:
        return note("GPU", detail, "end who else uses it, or see that the models fit")
    return ok("GPU", detail)


def check_links() -> Finding:
    """Checks whether GPUs map each other's memory, as ranks of a target need it."""
    count = torch.cuda.device_count()
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    missing = [f"{one} not {other}" for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    if not missing:
        return ok("GPU links", f"each of {count} GPUs maps the memory of the others")
    remedy = "--tensor-parallel-size needs GPUs that do; CUDA_VISIBLE_DEVICES chooses them"
    return note("GPU links", f"GPUs that map the memory of others: {', '.join(missing)}", remedy)


def check_models(models: ModelChoice) -> Iterator[Finding]:
    """Checks the directories of the target and a draft: readable, supported, fit for each other."""
    kinds = ("target model", models.target, describe_target), ("draft model", models.draft, describe_draft)
    for name, path, describe in kinds[: 1 if models.draft is None else 2]:
        try:
            yield ok(name, f"{path}: {describe(models)}")
        except (SlipstreamError, OSError) as error:
            reason = str(error).removeprefix(f"{path}: ")
            yield failed(name, f"{path}: {reason}", "another directory, or the whole checkpoint")


async def check_sharing_on_gpu() -> list[Finding]:
    """Checks MPS, then memory and both kinds of fences between two processes under it, and how fast they hand over.

    This process owns the memory and, like the scheduler, must be outside MPS.
    """
    with TemporaryDirectory(prefix="slipstream-doctor-") as name:
        directory = Path(name)
        try:
            async with mps_daemon(MpsMode.ON, directory) as daemon:
                assert daemon is not None, "it was asked for"
                found = await asyncio.to_thread(lambda: list(_check_gpu_fences(daemon.environment)))
            return [ok("MPS", "a daemon and its server run"), *found]
        except SlipstreamError as error:
            mps = note("MPS", str(error), _MPS_REMEDY)
        return [mps, *await asyncio.to_thread(lambda: list(_check_gpu_fences({})))]


def check_sharing_on_cpu() -> Iterator[Finding]:
    """Checks shared memory and futexes between two processes, and how fast they hand over."""
    return _check_fences(CPU, {}, ("shared memory of two processes", "auto", _SAME_NAMESPACES))


def _check_gpu_fences(environment: Mapping[str, str]) -> Iterator[Finding]:
    events = ("IPC memory and events", EVENT, _SAME_NAMESPACES)
    timelines = "IPC memory and stream memory operations", TIMELINE, "a newer driver; --fence event works without"
    return _check_fences(CUDA, environment, events, timelines)


def _check_fences(device: str, environment: Mapping[str, str], *kinds: tuple[str, str, str]) -> Iterator[Finding]:
    """`kinds`: name, fence and remedy of each. Only a fault of the first is fatal."""
    measured: list[HandOver] = []
    for name, fence, remedy in kinds:
        try:
            found = measure(device, fence, environment)
        except SlipstreamError as error:
            yield (failed if name == kinds[0][0] else note)(name, str(error), remedy)
            continue
        where = "" if device == CPU else " under MPS" if found.under_mps else " without MPS"
        yield ok(name, f"{WORDS} words there and back between two processes{where}, in order")
        measured.append(found)
    for found in measured:
        if found.times_us:
            yield from _speed(found)


def _speed(found: HandOver) -> Iterator[Finding]:
    detail = f"{found.p50_us:.1f} us (p99 {found.p99_us:.1f}), {found.fence_kind} fence, {TIMED} there and back"
    yield ok("hand-over between two processes", detail)
    for step_ms in STEPS_MS:
        share = found.overlap(step_ms)
        detail = f"{share:.1%} of a step is work at best, two hand-overs lost"
        name = f"overlap, kernels of {step_ms:g} ms a step"
        remedy = "larger models or batches, MPS on a GPU, or cores that are not busy with something else"
        yield ok(name, detail) if share >= GOOD_OVERLAP else note(name, detail, remedy)
