"""`slipstream-verify`: the verify service."""

from __future__ import annotations

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
    typer.run(verify)


def verify(
    model: ModelOption,
    listen: ListenOption,
    device: DeviceOption = WorkerConfig.device,
    dtype: DtypeOption = WorkerConfig.dtype,
    load_format: LoadFormatOption = WorkerConfig.load_format,
    threads: ThreadsOption = WorkerConfig.threads,
    simulate_accept_length: Annotated[
        float | None,
        typer.Option(
            "--simulate-accept-length",
            help="Measuring: accept draft tokens by chance, so many tokens a step on average; the output is no text.",
        ),
    ] = WorkerConfig.simulate_accept_length,
    deterministic_width: Annotated[
        int | None,
        typer.Option(
            "--deterministic-width",
            help="On a GPU: tokens of a row in every step, at least one more than are drafted; the output then does "
            "not depend on the batch or the draft.",
        ),
    ] = WorkerConfig.deterministic_width,
    metrics_port: MetricsOption = 0,
    log_level: LogLevelOption = "INFO",
    log_format: LogFormatOption = CONSOLE,
    acknowledge_done: AcknowledgeOption = WorkerConfig.acknowledge_done,
    debug_sync: DebugSyncOption = WorkerConfig.debug_sync,
    access_log_dir: AccessLogOption = WorkerConfig.access_log_dir,
) -> None:
    """Serves the target model, which checks what a draft proposes."""
    options = ServeOptions(listen=listen, metrics_port=metrics_port, log_level=log_level, log_format=log_format)
    serve(
        Role.VERIFY,
        options,
        lambda: WorkerConfig(
            model=model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            simulate_accept_length=simulate_accept_length,
            deterministic_width=deterministic_width,
            threads=threads,
            acknowledge_done=acknowledge_done,
            debug_sync=debug_sync,
            access_log_dir=access_log_dir,
        ),
    )


if __name__ == "__main__":
    main()
