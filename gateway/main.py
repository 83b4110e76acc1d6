"""`slipstream-gateway`: the service that clients talk to. Nothing heavy is imported before the address is claimed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.common.rpc.service_options import ServiceOptions, run_command, serve
from slipstream.common.settings import setting, with_options
from slipstream.gateway.config import LISTEN, GatewayConfig

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(ServiceOptions):
    """Address for clients, and logging."""

    listen: str = setting(LISTEN, help="HOST:PORT or unix:PATH for clients.", unit="ADDRESS")


def main() -> None:
    """Entry point."""
    run_command(gateway)


@with_options(GatewayConfig, GatewayOptions)
def gateway(**values: Any) -> None:
    """Serves clients: takes their jobs, has the scheduler run them, and sends the text."""
    serve("gateway", GatewayConfig, values, _run)


def _run(config: GatewayConfig, listener: Listener, options: ServiceOptions) -> int:
    import uvloop

    from slipstream.common.host import yield_to_streams
    from slipstream.gateway.server import run_gateway

    # Where the workers' streams are threads of this host's CPU, clients can wait for them.
    yield_to_streams()
    return uvloop.run(run_gateway(config, listener, options.metrics_port, options.metrics_host))


if __name__ == "__main__":
    main()
