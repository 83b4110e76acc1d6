"""`slipstream trace`: asks a server for the times of its next steps, and writes them as a file for a viewer."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, TextIO

import grpc.aio

from slipstream.cli.trace_events import trace_json
from slipstream.common.errors import ConfigError, FailedPreconditionError, UnavailableError
from slipstream.common.rpc.keepalive import Keepalive
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.worker.trace import MAX_STEPS, MAX_WAIT_MS, Trace, TraceRequest
from slipstream.protos import trace_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.cli.trace_events import TraceFile

STANDARD_OUTPUT = "-"


async def run_trace(server: str, steps: int, wait_s: float, out: str) -> int:
    """Writes a trace of the next `steps` steps to the file `out`, or to standard output if that is "-".

    Raises ConfigError naming what is wrong, UnavailableError without a server, DeadlineExceededError if nothing ran
    for `wait_s`.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError("steps", steps, f"1 to {MAX_STEPS}")
    if not 0.001 <= wait_s <= MAX_WAIT_MS / 1000:
        raise ConfigError("wait", wait_s, f"0.001 to {MAX_WAIT_MS / 1000:g} seconds")
    with _output(out) as write:
        trace = await fetch_trace(server, TraceRequest(steps=steps, wait_ms=round(1000 * wait_s)))
        content = trace_json(trace)
        write(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(_summary(trace, content, out), file=sys.stderr)
    return 0


async def fetch_trace(server: str, request: TraceRequest) -> Trace:
    """Asks the server at `server`. Raises what it raises, and UnavailableError when it does not answer."""
    options = [*Keepalive().options(), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(server, options=options) as channel:
        stub = trace_pb2_grpc.TimelineStub(channel)  # type: ignore[no-untyped-call]
        try:
            return Trace.from_pb(await stub.Trace(request.to_pb()))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise FailedPreconditionError(f"the server at {server} is too old to be traced") from error
            failure = error_from_rpc(error)
            if isinstance(failure, UnavailableError):
                raise UnavailableError(f"no trace from a server at {server}: {failure}") from error
            raise failure from error


@contextmanager
def _output(out: str) -> Iterator[Callable[[str], object]]:
    """Writes to a file that is only there when all went well. Raises ConfigError before anything else is done."""
    if out == STANDARD_OUTPUT:
        yield sys.stdout.write
        return
    path = Path(out)
    file = _temporary_beside(path)
    try:
        with file:
            yield file.write
        os.replace(file.name, path)
    except BaseException:
        Path(file.name).unlink(missing_ok=True)
        raise


def _temporary_beside(path: Path) -> TextIO:
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("it is there, and may not be written to")
        file = NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8")  # noqa: SIM115
        os.chmod(file.name, 0o666 & ~_umask())
        return file  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError("OUT", str(path), f"a file that this user can write ({error})") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _summary(trace: Trace, content: TraceFile, out: str) -> str:
    first, last = trace.steps[0].step, trace.steps[-1].step
    clocks = (
        f"clocks agree within {content['otherData']['clock_uncertainty_us']:.1f} us"
        if trace.device != "cpu"
        else "one clock"
    )
    where = "" if out == STANDARD_OUTPUT else f" are in {out}"
    return f"steps {first} to {last} of epoch {trace.epoch} ({clocks}){where}: open it in https://ui.perfetto.dev"
