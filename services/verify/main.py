"""`slipstream-verify`: the verify service."""

from __future__ import annotations

import typer

from slipstream.common.step import Role
from slipstream.services.command_line import (
    AccessLogOption,
    AcknowledgeOption,
    DeviceOption,
    ListenOption,
    LogLevelOption,
    MetricsOption,
    ModelOption,
    ServeOptions,
    StandInOption,
    ThreadsOption,
    serve,
)
from slipstream.services.config import WorkerConfig


def main() -> None:
    """Entry point."""
    typer.run(verify)


def verify(
    model: ModelOption,
    listen: ListenOption,
    device: DeviceOption = WorkerConfig.device,
    threads: ThreadsOption = WorkerConfig.threads,
    metrics_port: MetricsOption = 0,
    log_level: LogLevelOption = "INFO",
    stand_in_ms: StandInOption = WorkerConfig.stand_in_ms,
    acknowledge_done: AcknowledgeOption = WorkerConfig.acknowledge_done,
    access_log_dir: AccessLogOption = WorkerConfig.access_log_dir,
) -> None:
    """Serves the target model, which checks what a draft proposes."""
    options = ServeOptions(listen=listen, metrics_port=metrics_port, log_level=log_level)
    serve(
        Role.VERIFY,
        options,
        lambda: WorkerConfig(
            model=model,
            device=device,
            threads=threads,
            stand_in_ms=stand_in_ms,
            acknowledge_done=acknowledge_done,
            access_log_dir=access_log_dir,
        ),
    )


if __name__ == "__main__":
    main()
