"""The command line that draft and verify share. Light: nothing heavy is imported before the address is claimed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.common.errors import ConfigError, SlipstreamError
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.logs import configure_logging
from slipstream.common.worker.step import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.services.worker.config import WorkerConfig
    from slipstream.services.worker.server import MakeRole

ModelOption = Annotated[Path, typer.Option("--model", help="Hugging Face directory of the model.")]
ListenOption = Annotated[str, typer.Option("--listen", help="unix:PATH, in a directory that only this user opens.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto (bfloat16 on a GPU, float32 on a CPU), bfloat16, float16 or float32.")
]
LoadFormatOption = Annotated[
    str, typer.Option("--load-format", help="auto, or, measuring: dummy (random weights; config.json is enough).")
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Compute threads on a CPU; half the cores.")]
MetricsOption = Annotated[int, typer.Option("--metrics-port", help="Prometheus port on loopback; 0 is any free one.")]
LogLevelOption = Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR.")]
LogFormatOption = Annotated[str, typer.Option("--log-format", help="console or json.")]
DebugSyncOption = Annotated[
    bool, typer.Option("--debug-sync", help="Debugging: a wait for the GPU while a step is enqueued is an error.")
]
AcknowledgeOption = Annotated[
    bool, typer.Option("--acknowledge-done", help="Measuring: acknowledge a step when its work is done.")
]
AccessLogOption = Annotated[
    Path | None, typer.Option("--access-log-dir", help="Debugging: log accesses to shared memory there.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where a worker serves, and what it logs."""

    listen: str
    metrics_port: int
    log_level: str
    log_format: str


def serve(
    role: Role, options: ServeOptions, make_config: Callable[[], WorkerConfig], *, make_role: MakeRole | None = None
) -> None:
    """Claims the address, then loads the model and serves. Ends the process, with one line for an error of ours.

    `make_role`: loads something else in place of the model, on the thread that owns the device.
    """
    try:
        configure_logging(role.value, options.log_level, options.log_format)
        config = make_config()
        with Listener.claim(options.listen, field="listen") as listener:
            sys.exit(_run(role, options, config, listener, make_role))
    except SlipstreamError as error:
        print(f"slipstream-{role.value}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _run(
    role: Role, options: ServeOptions, config: WorkerConfig, listener: Listener, make_role: MakeRole | None
) -> int:
    import uvloop

    from slipstream.services.worker.factory import make_draft, make_verify
    from slipstream.services.worker.server import run_worker

    if make_role is None:
        make_role = make_draft if role is Role.DRAFT else make_verify
    return uvloop.run(run_worker(role, config, listener, options.metrics_port, make_role))
