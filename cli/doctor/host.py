"""Checks of what the services need of any host."""

from __future__ import annotations

import os
import resource
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.doctor.finding import failed, note, ok
from slipstream.cli.status import check
from slipstream.common.errors import UnavailableError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES, TcpAddress, parse_address

if TYPE_CHECKING:
    from slipstream.cli.doctor.finding import Finding

MIB = 1 << 20
FEWEST_SHM_BYTES, ENOUGH_SHM_BYTES = 32 * MIB, 512 * MIB
FEWEST_DESCRIPTORS, ENOUGH_DESCRIPTORS = 256, 4096
_FIRST_NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}
"""The kernel's fixed numbers of those that a host begins with."""
_LONGEST_SOCKET = "sockets/verify.sock"


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
    """A connection takes one, and so does a metrics scrape."""
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
    """Where `up` keeps sockets and logs."""
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
    """Whether one can listen there, or a server does already."""
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
