"""`slipstream-door`: OpenAI's interface, as a client of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.common.rpc.service_options import ServiceOptions, run_command, serve
from slipstream.common.settings import setting, with_options
from slipstream.door.config import NOT_OF_A_DOOR, DoorConfig

if TYPE_CHECKING:
    from slipstream.common.rpc.listener import Listener

LISTEN = "127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class DoorOptions(ServiceOptions):
    """Address for clients, and logging."""

    listen: str = setting(LISTEN, help="HOST:PORT for clients.", unit="ADDRESS")


def main() -> None:
    """Entry point."""
    run_command(door)


@with_options(DoorConfig, DoorOptions, without=NOT_OF_A_DOOR)
def door(**values: Any) -> None:
    """Serves OpenAI's interface over HTTP, as a client of a gateway."""
    serve("door", DoorConfig, values, _run)


def _run(config: DoorConfig, listener: Listener, options: ServiceOptions) -> int:
    import uvloop

    from slipstream.door.server import run_door

    return uvloop.run(run_door(config, listener, options.metrics_port, options.metrics_host))


if __name__ == "__main__":
    main()
