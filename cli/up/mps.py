"""NVIDIA MPS for the two workers: a control daemon that ends with this process.

Under MPS the kernels of two processes share the GPU without a context switch, and handing over between them
costs microseconds. The scheduler stays outside: whatever happens to the MPS server, the arena's owner survives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.cancellation import shielded
from slipstream.cli.up.process import ProcessGroup
from slipstream.common.errors import ConfigError, FailedPreconditionError, SlipstreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
START_TIMEOUT_S = 15.0
COMMAND_TIMEOUT_S = 10.0
POLL_S = 0.05
MAX_SOCKET_BYTES = 107
"""The daemon listens at Unix sockets in its pipe directory, the longest of which is `control_privileged`."""


class MpsMode(enum.StrEnum):
    """When the workers run under MPS."""

    AUTO = "auto"
    """If a daemon can be started."""
    ON = "on"
    """Always; `up` fails without."""
    OFF = "off"


class MpsDaemon:
    """A running control daemon with pipe and log directories of its own."""

    def __init__(self, directory: Path, control: str) -> None:
        """Made by `mps_daemon`. `control`: path of the control program."""
        self._control = control
        self.log_dir = directory / "log"
        self.pipe_dir = directory / "pipe"

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that make a process a client of this daemon; the control program finds the daemon by them, too."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_dir), "CUDA_MPS_LOG_DIRECTORY": str(self.log_dir)}

    async def command(self, text: str) -> str:
        """Sends the daemon a command and returns its answer. Raises FailedPreconditionError when there is none."""
        process = await asyncio.create_subprocess_exec(
            self._control,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.environment},
        )
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                output, _ = await process.communicate(f"{text}\n".encode())
        except TimeoutError:
            raise FailedPreconditionError(f"MPS: no answer to {text!r} within {COMMAND_TIMEOUT_S:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        answer = output.decode(errors="replace").strip()
        if process.returncode != 0:
            raise FailedPreconditionError(f"MPS: {text!r} failed: {answer or f'status {process.returncode}'}")
        return answer

    async def servers(self) -> list[int]:
        """Process ids of the servers that the daemon has started: one, once it is ready."""
        return [int(word) for word in (await self.command("get_server_list")).split() if word.isdigit()]

    async def let_go(self, pid: int) -> None:
        """Ends a client's work in an orderly way before it is killed; else the other clients may fail with it.

        If the daemon cannot do that, the log says so.
        """
        try:
            for server in await self.servers():
                with contextlib.suppress(FailedPreconditionError):  # it never was this server's client, or is gone
                    await self.command(f"terminate_client {server} {pid}")
        except (FailedPreconditionError, OSError) as error:
            logger.warning("process %d is killed in the midst of its work on the GPU: %s", pid, error)


def has_nvidia_device() -> bool:
    """Returns whether this host shows a GPU that may run under MPS."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def outside_mps(directory: Path) -> Mapping[str, str]:
    """Variables that keep a process out of every MPS daemon, the host's own included: a place without a daemon."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "outside")}


@asynccontextmanager
async def mps_daemon(mode: MpsMode, directory: Path) -> AsyncIterator[MpsDaemon | None]:
    """A daemon for as long as the context; None where there is none.

    `directory`, made if need be, takes its pipes and logs. Raises FailedPreconditionError (ConfigError if the
    directory's name is too long) when `mode` is ON and it cannot be had; AUTO says why in the log and goes without.
    """
    try:
        held = None if mode is MpsMode.OFF else await _start(directory)
    except SlipstreamError as error:
        if mode is MpsMode.ON:
            raise
        logger.warning("without MPS, a hand-over between the workers costs about 0.14 ms: %s", error)
        held = None
    if held is None:
        yield None
        return
    daemon, group = held
    during: BaseException | None = None
    try:
        yield daemon
    except BaseException as error:
        during = error
        raise
    finally:
        await shielded(_stop(daemon, group), during=during)


async def _start(directory: Path) -> tuple[MpsDaemon, ProcessGroup]:
    control = shutil.which(CONTROL)
    if control is None:
        raise FailedPreconditionError(f"MPS: {CONTROL} is not installed (it comes with NVIDIA's driver)")
    daemon = MpsDaemon(directory, control)
    longest = daemon.pipe_dir / "control_privileged"
    if len(os.fsencode(longest)) > MAX_SOCKET_BYTES:
        room = MAX_SOCKET_BYTES - len(os.fsencode(longest)) + len(os.fsencode(directory))
        raise ConfigError("state_dir", str(directory), f"for MPS, a path of at most {room} bytes")
    for path in (daemon.pipe_dir, daemon.log_dir):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    # In the foreground and bound to us: a daemon that detaches itself would outlive an `up` that is killed.
    with (daemon.log_dir / "control.log").open("wb") as log:
        group = ProcessGroup(control, "-f", output=log, environment=daemon.environment)
    try:
        await _until_served(daemon, group)
    except BaseException:
        await shielded(_stop(daemon, group))  # a cancellation counts for more than an error, which AUTO forgives
        raise
    return daemon, group


async def _until_served(daemon: MpsDaemon, group: ProcessGroup) -> None:
    """Returns when a server of this user runs: only then is it certain that one can."""
    last: SlipstreamError = FailedPreconditionError("MPS: the control daemon did not answer")
    has_asked = False
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while group.status is None:
                try:
                    if not has_asked:
                        await daemon.command(f"start_server -uid {os.geteuid()}")
                        has_asked = True
                    if await daemon.servers():
                        return
                except FailedPreconditionError as error:
                    last = error
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise FailedPreconditionError(f"{last}; see {daemon.log_dir}") from None
    raise FailedPreconditionError(f"MPS: the control daemon ended with status {group.status}; see {daemon.log_dir}")


async def _stop(daemon: MpsDaemon, group: ProcessGroup) -> None:
    try:
        if group.status is None:
            with contextlib.suppress(FailedPreconditionError, OSError):
                await daemon.command("quit")
            await group.ends_within(COMMAND_TIMEOUT_S)
    finally:
        group.kill()  # its server too, which outlives a daemon that did not get to end it
