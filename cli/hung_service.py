"""Ends a service that has stopped answering, for process managers that start it again only when its process ends."""

from __future__ import annotations

import os
import signal
import socket
import struct

from slipstream.cli.status import check
from slipstream.common.errors import ConfigError, UnavailableError
from slipstream.common.rpc.address import UnixAddress, parse_address

NUM_CHECKS = 4
"""Health checks in a row that a service leaves without an answer before it is killed; each waits 2 s."""
_CREDENTIALS = struct.Struct("3i")


async def check_or_kill(address: str) -> str:
    """Returns the health of the service at unix:PATH. Kills the process that listens there and does not answer.

    Raises UnavailableError when no process listens there, and when one was killed.
    """
    parsed = parse_address(address, field="ADDRESS")
    if not isinstance(parsed, UnixAddress):
        raise ConfigError("kill_hung", address, "unix:PATH, whose process is known")
    num_missed = 0
    while True:
        try:
            return await check(address)
        except UnavailableError as error:
            if (pid := _listener(parsed)) is None:
                raise
            num_missed += 1
            if num_missed == NUM_CHECKS:
                os.kill(pid, signal.SIGKILL)
                raise UnavailableError(f"{address} does not answer: its process {pid} was killed") from error


def _listener(address: UnixAddress) -> int | None:
    """Id of the process that listens there; None if there is none, or none that can be seen from here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog of a process that is stopped
        try:
            probe.connect(str(address.path))
        except OSError:
            return None
        # Those of the process that called `listen`, in our own namespace: 0 if it is not there.
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid or None
