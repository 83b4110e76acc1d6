"""`slipstream-scheduler`: the service that clients talk to. Nothing heavy is imported before the address is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.common.rpc.service_options import ServiceOptions, run_command, serve
from slipstream.common.settings import setting, with_options
from slipstream.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener

LISTEN = "127.0.0.1:50051"


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions(ServiceOptions):
    """Address for clients, and logging."""

    listen: str = setting(LISTEN, help="HOST:PORT or unix:PATH for clients.", unit="ADDRESS")


def main() -> None:
    """Entry point."""
    run_command(scheduler)


@with_options(SchedulerConfig, SchedulerOptions)
def scheduler(**values: Any) -> None:
    """Takes generation jobs and drives the draft and the verify service."""
    serve("scheduler", SchedulerConfig, values, _run)


def _run(config: SchedulerConfig, listener: Listener, options: ServiceOptions) -> int:
    import uvloop

    from slipstream.scheduler.server import run_scheduler

    return uvloop.run(run_scheduler(config, listener, options.metrics_port))


if __name__ == "__main__":
    main()
