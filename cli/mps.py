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
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.cancellation import shielded
from slipstream.cli.process import start_bound
from slipstream.common.errors import ConfigError, FailedPreconditionError, SlipstreamError
from slipstream.common.rpc.address import MAX_UNIX_PATH_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
START_TIMEOUT_S = 15.0
COMMAND_TIMEOUT_S = 10.0
POLL_S = 0.05
_LONGEST_SOCKET = "control_privileged"
"""The longest name of the Unix sockets in the daemon's pipe directory."""


class MpsMode(enum.StrEnum):
    """Whether the workers run under MPS: if a daemon can be started, or always (`up` fails without), or never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class MpsDaemon:
    """A control daemon with its own pipe and log directories.

    Only `stop` reaps it: until then no other process or group can get its id.
    """

    def __init__(self, directory: Path) -> None:
        """Starts it. Raises FailedPreconditionError without the program, ConfigError if the path is too long."""
        control = shutil.which(CONTROL)
        if control is None:
            raise FailedPreconditionError(f"MPS: {CONTROL} is not installed (it comes with NVIDIA's driver)")
        self._control = control
        self._log_dir = directory / "log"
        self._pipe_dir = directory / "pipe"
        longest = self._pipe_dir / _LONGEST_SOCKET
        if len(os.fsencode(longest)) > MAX_UNIX_PATH_BYTES:
            room = MAX_UNIX_PATH_BYTES - len(os.fsencode(longest)) + len(os.fsencode(directory))
            raise ConfigError("state_dir", str(directory), f"for MPS, a path of at most {room} bytes")
        for path in (self._pipe_dir, self._log_dir):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In the foreground and bound to us: a daemon that detaches itself would outlive an `up` that is killed.
        with (self._log_dir / "control.log").open("wb") as log:
            self._process = start_bound((control, "-f"), log, self._directories)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that make a process a client of this daemon.

        A daemon that sees only some GPUs numbers them anew, from 0: clients name GPUs by these numbers.
        """
        visible = os.environ.get(VISIBLE_DEVICES, "").split(",")
        if not all(number.strip().isdigit() for number in visible):
            return self._directories  # None is named, or by UUID, which holds on both sides.
        return {**self._directories, VISIBLE_DEVICES: ",".join(map(str, range(len(visible))))}

    @property
    def _directories(self) -> Mapping[str, str]:
        """Variables by which the control program finds the daemon."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe_dir), "CUDA_MPS_LOG_DIRECTORY": str(self._log_dir)}

    async def command(self, text: str) -> str:
        """Sends the daemon a command and returns its answer. Raises FailedPreconditionError when there is none."""
        process = await asyncio.create_subprocess_exec(
            self._control,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self._directories},
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
        """Process ids of the daemon's servers: one, once it is ready."""
        return [int(word) for word in (await self.command("get_server_list")).split() if word.isdigit()]

    async def release(self, pid: int) -> None:
        """Ends a client's work in an orderly way before it is killed; else the other clients may fail with it.

        If the daemon cannot do that, the log says so.
        """
        try:
            for server in await self.servers():
                with contextlib.suppress(FailedPreconditionError):  # it never was this server's client, or is gone
                    await self.command(f"terminate_client {server} {pid}")
        except (FailedPreconditionError, OSError) as error:
            logger.warning("process %d is killed in the midst of its work on the GPU: %s", pid, error)

    async def wait_ready(self) -> None:
        """Returns when a server of this user runs: only then is it certain that one can."""
        last: SlipstreamError = FailedPreconditionError("MPS: the control daemon did not answer")
        has_asked = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (status := self._status()) is None:
                    try:
                        if not has_asked:
                            await self.command(f"start_server -uid {os.geteuid()}")
                            has_asked = True
                        if await self.servers():
                            return
                    except FailedPreconditionError as error:
                        last = error
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise FailedPreconditionError(f"{last}; see {self._log_dir}") from None
        raise FailedPreconditionError(f"MPS: the control daemon ended with status {status}; see {self._log_dir}")

    async def stop(self) -> None:
        """Asks it to quit, then ends all processes of its group."""
        try:
            if self._status() is None:
                with contextlib.suppress(FailedPreconditionError, OSError):
                    await self.command("quit")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COMMAND_TIMEOUT_S):
                        while self._status() is None:  # noqa: ASYNC110 - an end that is not reaped raises no event
                            await asyncio.sleep(POLL_S)
        finally:
            os.killpg(self._process.pid, signal.SIGKILL)  # its server too, which outlives a daemon that was killed
            self._process.wait()

    def _status(self) -> int | None:
        """Exit status, or the negative number of the signal. None: it runs."""
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def has_nvidia_device() -> bool:
    """Returns whether this host shows a GPU that may run under MPS."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def outside_mps(directory: Path) -> Mapping[str, str]:
    """Variables that keep a process out of every MPS daemon, the host's own included: a directory without one."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(directory / "outside")}


@asynccontextmanager
async def mps_daemon(mode: MpsMode, directory: Path) -> AsyncIterator[MpsDaemon | None]:
    """Yields a daemon that ends with the context. None: no MPS.

    `directory`, made if need be, takes its pipes and logs. Raises FailedPreconditionError (ConfigError if the
    directory's name is too long) if `mode` is ON and no daemon can start; AUTO logs the reason and continues without.
    """
    daemon = None
    if mode is not MpsMode.OFF:
        try:
            daemon = await _start(directory)
        except SlipstreamError as error:
            if mode is MpsMode.ON:
                raise
            logger.warning("without MPS, a hand-over between the workers costs about 0.14 ms: %s", error)
    try:
        yield daemon
    finally:
        if daemon is not None:
            await shielded(daemon.stop(), during=sys.exception())


async def _start(directory: Path) -> MpsDaemon:
    daemon = MpsDaemon(directory)
    try:
        await daemon.wait_ready()
    except BaseException:
        await shielded(daemon.stop())  # a cancellation counts for more than an error, which AUTO forgives
        raise
    return daemon
