"""`slipstream-scheduler`: the service that clients talk to. Nothing heavy is imported before the address is claimed."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from slipstream.common.errors import ConfigError, SlipstreamError
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.logs import CONSOLE, configure_logging
from slipstream.scheduler.config import SchedulerConfig

LISTEN = "127.0.0.1:50051"


def main() -> None:
    """Entry point."""
    typer.run(scheduler)


def scheduler(
    verify: Annotated[str, typer.Option(help="Address of the verify service, unix:PATH.")],
    draft: Annotated[
        str | None, typer.Option(help="Address of the draft service; without one, verify decodes plainly.")
    ] = SchedulerConfig.draft,
    listen: Annotated[str, typer.Option(help="HOST:PORT or unix:PATH for clients.")] = LISTEN,
    num_draft_tokens: Annotated[
        int, typer.Option(help="Tokens drafted in a step (K).")
    ] = SchedulerConfig.num_draft_tokens,
    run_ahead: Annotated[
        int, typer.Option(help="Steps sent before the result of the first is known, less one.")
    ] = SchedulerConfig.run_ahead,
    slots: Annotated[int, typer.Option(help="Requests that run at the same time.")] = SchedulerConfig.slots,
    context_tokens: Annotated[
        int | None, typer.Option(help="Prompt and output together; what the models were made for.")
    ] = SchedulerConfig.context_tokens,
    kv_memory_mib: Annotated[
        int | None, typer.Option(help="KV pages of both workers together; 512 on a CPU, what is free on a GPU.")
    ] = SchedulerConfig.kv_memory_mib,
    memory_reserve_mib: Annotated[
        int, typer.Option(help="GPU memory that is left free, where --kv-memory-mib is not given.")
    ] = SchedulerConfig.memory_reserve_mib,
    page_tokens: Annotated[int, typer.Option(help="Tokens in a KV page.")] = SchedulerConfig.page_tokens,
    chunk_tokens: Annotated[
        int, typer.Option(help="Prompt tokens in one prefill step.")
    ] = SchedulerConfig.chunk_tokens,
    queue: Annotated[int, typer.Option(help="Requests that may wait for a slot.")] = SchedulerConfig.queue,
    stream_interval_ms: Annotated[
        float, typer.Option(help="A client gets a message at most this often, and all together one a millisecond.")
    ] = SchedulerConfig.stream_interval_ms,
    kept_jobs: Annotated[
        int, typer.Option(help="Jobs that are kept after their end, to be watched and asked after.")
    ] = SchedulerConfig.kept_jobs,
    job_ttl_s: Annotated[float, typer.Option(help="How long they are kept.")] = SchedulerConfig.job_ttl_s,
    read_timeout_s: Annotated[
        float, typer.Option(help="A stream whose client reads nothing for so long is cut off.")
    ] = SchedulerConfig.read_timeout_s,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port on loopback; 0 is any free one.")] = 0,
    grace_s: Annotated[
        float, typer.Option(help="After the first SIGTERM, running jobs may take this long.")
    ] = SchedulerConfig.grace_s,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: Annotated[str, typer.Option(help="console or json.")] = CONSOLE,
    dispatch: Annotated[
        str, typer.Option(help="Measuring: together, or acknowledged (a command waits for what it depends on).")
    ] = SchedulerConfig.dispatch,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, as the workers have it.")] = SchedulerConfig.device,
    fence: Annotated[
        str, typer.Option(help="On a GPU: auto, timeline (stream memory operations) or event (IPC events).")
    ] = SchedulerConfig.fence,
    debug: Annotated[bool, typer.Option(help="Check the FutureMap's rules at run time.")] = SchedulerConfig.debug,
    access_log_dir: Annotated[
        Path | None, typer.Option(help="Debugging: log accesses to shared memory there.")
    ] = SchedulerConfig.access_log_dir,
) -> None:
    """Takes generation jobs and drives the draft and the verify service."""
    try:
        configure_logging("scheduler", log_level, log_format)
        config = SchedulerConfig(
            verify=verify,
            draft=draft,
            num_draft_tokens=num_draft_tokens,
            run_ahead=run_ahead,
            slots=slots,
            context_tokens=context_tokens,
            kv_memory_mib=kv_memory_mib,
            memory_reserve_mib=memory_reserve_mib,
            page_tokens=page_tokens,
            chunk_tokens=chunk_tokens,
            queue=queue,
            stream_interval_ms=stream_interval_ms,
            kept_jobs=kept_jobs,
            job_ttl_s=job_ttl_s,
            read_timeout_s=read_timeout_s,
            grace_s=grace_s,
            dispatch=dispatch,
            device=device,
            fence=fence,
            debug=debug,
            access_log_dir=access_log_dir,
        )
        with Listener.claim(listen, field="listen") as listener:
            sys.exit(_run(config, listener, metrics_port))
    except SlipstreamError as error:
        print(f"slipstream-scheduler: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _run(config: SchedulerConfig, listener: Listener, metrics_port: int) -> int:
    import uvloop

    from slipstream.scheduler.server import run_scheduler

    return uvloop.run(run_scheduler(config, listener, metrics_port))


if __name__ == "__main__":
    main()
