"""A scheduler under one of the earlier policies, for `overlap.py`: the real one, but for its device."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.logs import CONSOLE, configure_logging
from slipstream.scheduler.config import SchedulerConfig


def main() -> None:
    """Entry point."""
    typer.run(scheduler)


def scheduler(
    policy: Annotated[str, typer.Argument(help="whole_step or main_stream.")],
    verify: Annotated[str, typer.Option()],
    draft: Annotated[str, typer.Option()],
    listen: Annotated[str, typer.Option()],
    metrics_port: Annotated[int, typer.Option()],
    run_ahead: Annotated[int, typer.Option()],
    num_draft_tokens: Annotated[int, typer.Option()],
    slots: Annotated[int, typer.Option()],
    context_tokens: Annotated[int, typer.Option()],
) -> None:
    """Serves as `slipstream-scheduler` does, on a GPU with timeline fences."""
    from slipstream.benchmarks.policy_device import PolicyDevice
    from slipstream.scheduler.server import run_scheduler

    configure_logging("scheduler", "INFO", CONSOLE)
    config = SchedulerConfig(
        verify=verify,
        draft=draft,
        run_ahead=run_ahead,
        num_draft_tokens=num_draft_tokens,
        slots=slots,
        context_tokens=context_tokens,
        device="cuda",
    )
    with Listener.claim(listen, field="listen") as listener:
        sys.exit(asyncio.run(run_scheduler(config, listener, metrics_port, device=PolicyDevice(policy))))


if __name__ == "__main__":
    main()
