"""`slipstream-scheduler`: the service that gateways submit to. Imports nothing heavy before the address is claimed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.common.rpc.service_options import ServiceOptions, run_command, serve
from slipstream.common.settings import with_options
from slipstream.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener


def main() -> None:
    """Entry point."""
    run_command(scheduler)


@with_options(SchedulerConfig, ServiceOptions)
def scheduler(**values: Any) -> None:
    """Runs sequences for gateways and drives the draft and the verify service."""
    serve("scheduler", SchedulerConfig, values, _run)


def _run(config: SchedulerConfig, listener: Listener, options: ServiceOptions) -> int:
    import uvloop

    from slipstream.scheduler.server import run_scheduler

    return uvloop.run(run_scheduler(config, listener, options.metrics_port, options.metrics_host))


if __name__ == "__main__":
    main()
