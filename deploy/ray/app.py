"""Serves by Ray Serve: each replica of the deployment is a server, the child `slipstream up` of its actor.

Serve's gRPC proxy takes the calls of `Generation` that any server can answer, and chooses a replica for each. A call by
a job's id is refused, as it would reach any replica. The file config.yaml beside this one says how Serve is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from inspect import isasyncgenfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from slipstream.common.private_files import lock
from slipstream.protos import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from ray.serve.grpc_util import RayServegRPCContext

_UNLIMITED = (("grpc.max_receive_message_length", -1),)
_STOP_S = 60.0
"""Longest wait for a server to end."""
_POLL_S = 0.1
_PREFIX, _OPTIONS, _LOCK = "slipstream-ray-", "options.yaml", "replica.lock"
"""Beginning of the name of a server's folder, its file of options, and what its replica locks."""
_HEALTH_TIMEOUT_S = 5.0
_NOT_PASSED = (":", "grpc-", "user-agent", "te", "content-type")
"""Beginnings of the names of metadata that are about a connection."""


def _passed(grpc_context: RayServegRPCContext) -> tuple[tuple[str, str], ...]:
    """The caller's metadata, without what is about its connection."""
    given: Iterable[tuple[str, str]] = grpc_context.invocation_metadata()
    return tuple((name, value) for name, value in given if not name.startswith(_NOT_PASSED))


@asynccontextmanager
async def _errors_of(grpc_context: RayServegRPCContext) -> AsyncIterator[None]:
    """Gives the caller the server's own status; UNAVAILABLE where the server is gone."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        grpc_context.set_code(error.code())
        grpc_context.set_details(error.details() or "")
        grpc_context.set_trailing_metadata(list(error.trailing_metadata() or ()))
        raise RuntimeError(f"the server answered {error.code().name}: {error.details()}") from None


def _answered(name: str) -> Any:
    """Returns the method of `Server` that passes a call with one answer to its server."""

    async def call(self: Server, request: Any, grpc_context: RayServegRPCContext) -> Any:
        async with _errors_of(grpc_context):
            stub = self._health if name == "Check" else self._server
            return await getattr(stub, name)(request, metadata=_passed(grpc_context))

    return call


def _refused(name: str) -> Any:
    """Returns the method of `Server` that refuses a call by a job's id."""
    message = f"{name} is not served by Ray Serve, which may choose a server that does not have the job"

    async def call(self: Server, request: Any, grpc_context: RayServegRPCContext) -> None:
        grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        grpc_context.set_details(message)
        raise NotImplementedError(message)

    return call


def cancelling(stream: Any) -> Any:
    """Returns a handler of Serve's proxy that ends its call whenever the caller leaves.

    Serve cancels the replica's task only if the caller leaves while it waits for that task, and not while it sends.
    """

    async def call(request: Any, context: Any) -> None:
        messages = stream(request, context)
        async for message in messages:
            try:
                await context.write(message)
            except asyncio.CancelledError:
                waiting = asyncio.ensure_future(anext(messages))
                await asyncio.sleep(0)  # now it waits
                waiting.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await waiting
                raise

    return call


class Server:
    """A replica. Raises RuntimeError if its server does not start."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Returns when the server serves. `options`: of `slipstream up`, as in its file of options."""
        remove_folders_of_the_killed()
        self._directory = new_folder(options)
        self._child = subprocess.Popen(_command(self._directory), stdin=subprocess.DEVNULL)
        address = self._directory / "server"
        while not address.exists():
            if self._child.poll() is not None:
                raise RuntimeError(f"slipstream up ended with status {self._child.returncode}: see this replica's log")
            time.sleep(_POLL_S)
        channel = grpc.aio.insecure_channel(address.read_text(encoding="utf-8"), options=_UNLIMITED)
        self._server: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def __del__(self) -> None:
        """Lets the server end: Serve has waited for the requests by then."""
        self._child.terminate()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def check_health(self) -> None:
        """Raises RuntimeError if the server is gone or does not answer: Serve then starts another replica."""
        if self._child.poll() is not None:
            raise RuntimeError(f"slipstream up ended with status {self._child.returncode}")
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(f"the gateway does not answer: {error.details()}") from error

    async def Generate(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[Any]:
        """Streams a server's answer. A caller that leaves ends the call, and so its job."""
        call = self._server.Generate(request, metadata=_passed(grpc_context))
        # Serve says INTERNAL of an actor that died, where no other status was set: clients move after UNAVAILABLE.
        grpc_context.set_code(grpc.StatusCode.UNAVAILABLE)
        try:
            async with _errors_of(grpc_context):
                async for message in call:
                    if message.HasField("job_usage"):
                        grpc_context.set_code(grpc.StatusCode.OK)
                    yield message
        finally:
            call.cancel()

    GetServerInfo = _answered("GetServerInfo")
    Tokenize = _answered("Tokenize")
    Detokenize = _answered("Detokenize")
    Check = _answered("Check")
    CreateJob = _refused("CreateJob")
    GetJob = _refused("GetJob")
    ListJobs = _refused("ListJobs")
    CancelJob = _refused("CancelJob")

    async def WatchJob(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncIterator[Any]:
        """Refuses it."""
        yield await _refused("WatchJob")(self, request, grpc_context)


def add_services(servicer: Any, server: Any) -> None:
    """Adds the services of a server to Serve's proxy, which calls this as it starts."""
    factory = server.service_handler_factory

    def handler_of(**method: Any) -> Any:
        handler = factory(**method)
        return cancelling(handler) if isasyncgenfunction(handler) else handler

    server.service_handler_factory = handler_of
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.service_handler_factory = factory


def build(options: dict[str, Any]) -> Any:
    """Returns the application of Serve's configuration, whose `args` are options of `slipstream up`."""
    deployment: Any = serve.deployment(name="slipstream", health_check_period_s=1, health_check_timeout_s=10)
    return deployment(Server).bind(options)


def new_folder(options: Mapping[str, Any]) -> Path:
    """Makes a server's folder, which this process has locked until it ends."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock(folder / _LOCK)
    (folder / _OPTIONS).write_text(json.dumps(dict(options)), encoding="utf-8")
    return folder


def remove_folders_of_the_killed() -> None:
    """Removes the folders of replicas on this host that did not live to do it."""
    # A folder without options may not be locked yet.
    for options in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OPTIONS}"):
        with suppress(OSError):
            os.close(lock(options.with_name(_LOCK)))
            shutil.rmtree(options.parent, ignore_errors=True)


def _command(directory: Path) -> tuple[str, ...]:
    """The server's command; it dies with this process."""
    bound = ("slipstream.cli.exec_with_parent", str(os.getpid()))
    up = ("up", "--config", str(directory / _OPTIONS), "--state-dir", str(directory), "--listen", "127.0.0.1:0")
    return (sys.executable, "-m", *bound, sys.executable, "-m", "slipstream.cli.main", *up)
