"""Checks of a host: what the services need of it, its GPU, and the model directories."""

from __future__ import annotations

import ctypes
import enum
import os
import re
import resource
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.status import check
from slipstream.cli.up.mps import has_nvidia_device
from slipstream.common.errors import SlipstreamError, UnavailableError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES, TcpAddress, parse_address
from slipstream.services.worker.config import EAGLE3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.cli.model_choice import ModelChoice

MIB = 1 << 20
FEWEST_SHM_BYTES, ENOUGH_SHM_BYTES = 32 * MIB, 512 * MIB
FEWEST_DESCRIPTORS, ENOUGH_DESCRIPTORS = 256, 4096
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The kernel's fixed names of a host's first namespaces."""
_LONGEST_SOCKET = "sockets/verify.sock"
_DRIVER = Path("/proc/driver/nvidia/version")
_WITHOUT = "none needed with --device cpu; for a GPU, install NVIDIA's driver (in containers, its container toolkit)"


class Verdict(enum.Enum):
    """How serious a finding is."""

    OK = "ok"
    NOTE = "note"
    """It works, but one should know."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what is there and, unless all is well, what to do."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    """A finding that all is well."""
    return Finding(name, Verdict.OK, detail)


def note(name: str, detail: str, remedy: str = "") -> Finding:
    """A finding that something works, but not at its best."""
    return Finding(name, Verdict.NOTE, detail, remedy)


def failed(name: str, detail: str, remedy: str) -> Finding:
    """A finding that something does not work."""
    return Finding(name, Verdict.FAILED, detail, remedy)


def check_shm(directory: Path = Path("/dev/shm")) -> Finding:
    """Room for arenas of the CPU backend; CUDA keeps event handles there too."""
    name = f"shared memory {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return failed(name, "this user cannot write there", "mount a tmpfs there with mode 1777")
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    detail = f"{free / MIB:.0f} MiB free"
    remedy = "a larger /dev/shm (in containers --shm-size, here 1 GiB), or remove what lies there"
    if free < FEWEST_SHM_BYTES:
        return failed(name, detail, remedy)
    return ok(name, detail) if free >= ENOUGH_SHM_BYTES else note(name, detail, remedy)


def check_descriptors() -> Finding:
    """File descriptors: a connection takes one, and so does a metrics scrape."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    detail = f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open (at most {most})"
    remedy = f"raise it: ulimit -n {ENOUGH_DESCRIPTORS}, LimitNOFILE=, or ulimits: nofile"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_DESCRIPTORS:
        return ok("descriptors", detail)
    return failed("descriptors", detail, remedy) if soft < FEWEST_DESCRIPTORS else note("descriptors", detail, remedy)


def check_namespaces() -> Finding:
    """The PID and IPC namespaces, which all three services must share for CUDA IPC."""
    here = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _FIRST_NAMESPACES}
    detail = ", ".join(here.values())
    if here == _FIRST_NAMESPACES:
        return ok("namespaces", f"{detail}: the host's own")
    return note("namespaces", f"{detail}: a container's", "all three services must join these, as in compose.yaml")


def check_state_dir(path: Path) -> Finding:
    """The directory where `up` keeps sockets and logs."""
    name = f"state directory {path}"
    longest = len(os.fsencode(path.absolute() / _LONGEST_SOCKET))
    if longest > MAX_UNIX_PATH_BYTES:
        return failed(name, f"its sockets' names have {longest} bytes", "a shorter one: --state-dir")
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failed(name, f"this user cannot write to {there}", "another one: --state-dir")
    if there != path.absolute():
        return ok(name, "will be made, for this user alone")
    status = there.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        remedy = f"chown it to this user and chmod 700 {path}: who can open a worker's socket can drive it"
        return failed(name, f"owner {status.st_uid}, mode {mode:o}", remedy)
    return ok(name, f"this user's alone (mode {mode:o})")


async def check_port(what: str, address: str) -> Finding:
    """An address to listen at: free, or taken by a server or by something else."""
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
    try:
        return note(
            name, f"a service is at {address} already: {await check(str(parsed))}", "one at a time, or --listen"
        )
    except UnavailableError:
        return failed(name, f"{address}: {reason}", "end who has it, or take another port")


def check_driver(*, is_needed: bool) -> Finding:
    """NVIDIA's kernel driver and its library."""
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
    """PyTorch's CUDA and the bindings."""
    import torch

    from slipstream.common.device.choose import cuda_obstacle

    obstacle = cuda_obstacle()
    detail = f"PyTorch {torch.__version__}"
    if obstacle is None:
        return ok("CUDA", f"{detail}, CUDA {torch.version.cuda}, cuda-bindings")
    return failed("CUDA", detail, obstacle) if is_needed else note("CUDA", f"{detail}: on the CPU", obstacle)


def check_gpu() -> Finding:
    """The first GPU that is shown to this process."""
    import torch

    gpu = torch.cuda.get_device_properties(0)
    free, total = (size >> 30 for size in torch.cuda.mem_get_info(0))
    detail = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {free} of {total} GiB free"
    if gpu.major < 8:
        return note("GPU", detail, "bfloat16 needs 8.0: start with --dtype float16 or float32")
    if free * 10 < total:
        return note("GPU", detail, "end who else uses it, or see that the models fit")
    return ok("GPU", detail)


def check_models(models: ModelChoice) -> Iterator[Finding]:
    """The directories of the target and, if there is one, the draft: readable, supported, fit for each other."""
    from slipstream.services.models.checkpoint import tokenizer_fingerprint
    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.eagle3 import Eagle3Config

    def of_target() -> str:
        tokenizer_fingerprint(models.target)
        return ModelConfig.from_directory(models.target).architecture

    def of_draft(path: Path) -> str:
        if models.draft_algorithm == EAGLE3:
            Eagle3Config.from_directory(path)
            return "an EAGLE-3 head"
        if tokenizer_fingerprint(path) != tokenizer_fingerprint(models.target):
            raise SlipstreamError("its tokenizer is not the target's")
        return f"{ModelConfig.from_directory(path).architecture}, with the target's tokenizer"

    yield _check_model("target model", models.target, of_target)
    draft = models.draft
    if draft is not None:
        yield _check_model("draft model", draft, lambda: of_draft(draft))


def _check_model(name: str, path: Path, describe: Callable[[], str]) -> Finding:
    try:
        description = describe()
    except (SlipstreamError, OSError) as error:
        return failed(name, f"{path}: {error}", "another directory, or the whole checkpoint")
    if not any(path.glob("*.safetensors")):
        return failed(name, f"{path}: no safetensors in it", "the whole checkpoint, with its *.safetensors")
    return ok(name, f"{path}: {description}")
