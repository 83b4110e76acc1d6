"""`slipstream-draft`: the draft service."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - read at run time by the command line
from typing import Annotated

import typer

from slipstream.common.rpc.logs import CONSOLE
from slipstream.common.worker.step import Role
from slipstream.services.worker.command_line import (
    AccessLogOption,
    AcknowledgeOption,
    DebugSyncOption,
    DeviceOption,
    DtypeOption,
    ListenOption,
    LoadFormatOption,
    LogFormatOption,
    LogLevelOption,
    MetricsOption,
    ModelOption,
    ServeOptions,
    ThreadsOption,
    serve,
)
from slipstream.services.worker.config import WorkerConfig


def main() -> None:
    """Entry point."""
    typer.run(draft)


def draft(
    model: ModelOption,
    listen: ListenOption,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="How it drafts: standalone or eagle3.")
    ] = WorkerConfig.algorithm,
    target: Annotated[
        Path | None,
        typer.Option("--target", help="The target's directory, for a head without embedding or tokenizer of its own."),
    ] = WorkerConfig.target,
    device: DeviceOption = WorkerConfig.device,
    dtype: DtypeOption = WorkerConfig.dtype,
    load_format: LoadFormatOption = WorkerConfig.load_format,
    threads: ThreadsOption = WorkerConfig.threads,
    metrics_port: MetricsOption = 0,
    log_level: LogLevelOption = "INFO",
    log_format: LogFormatOption = CONSOLE,
    acknowledge_done: AcknowledgeOption = WorkerConfig.acknowledge_done,
    debug_sync: DebugSyncOption = WorkerConfig.debug_sync,
    access_log_dir: AccessLogOption = WorkerConfig.access_log_dir,
) -> None:
    """Serves a draft model, which proposes tokens."""
    options = ServeOptions(listen=listen, metrics_port=metrics_port, log_level=log_level, log_format=log_format)
    serve(
        Role.DRAFT,
        options,
        lambda: WorkerConfig(
            model=model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            threads=threads,
            acknowledge_done=acknowledge_done,
            debug_sync=debug_sync,
            access_log_dir=access_log_dir,
            algorithm=algorithm,
            target=target,
        ),
    )


if __name__ == "__main__":
    main()
