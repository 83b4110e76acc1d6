"""How each service is started: its command line, the address it serves at, its log file, inside MPS or outside."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.cli.up.mps import outside_mps
from slipstream.cli.up.process import ServiceCommand
from slipstream.common.rpc.address import TcpAddress, parse_address
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.service_options import ServiceOptions
from slipstream.common.settings import arguments

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.cli.up.config import UpConfig
    from slipstream.cli.up.mps import MpsDaemon
    from slipstream.common.settings import Settings

LOOPBACK = "127.0.0.1"
"""Address of the metrics ports."""
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def worker_command(config: UpConfig, name: str) -> ServiceCommand:
    """The "verify" or the "draft" service of a configuration."""
    return _command(config, name, f"slipstream.services.{name}.main", config.socket(name), config.worker(name))


def scheduler_command(config: UpConfig, listen: str) -> ServiceCommand:
    """The scheduler of a configuration, for clients at `listen`, whose port is not 0."""
    return _command(config, "scheduler", "slipstream.scheduler.main", listen, config.scheduler)


def _command(config: UpConfig, name: str, module: str, listen: str, settings: Settings) -> ServiceCommand:
    options = ServiceOptions(
        listen=listen,
        metrics_port=config.metrics_port_of(name),
        log_level=config.log_level,
        log_format=config.log_format,
    )
    return ServiceCommand(
        name=name,
        # -P, so that the working directory shadows no import.
        argv=(sys.executable, "-P", "-m", module, *arguments(options), *arguments(settings)),
        address=dialled(listen),
        log_path=config.log_path(name),
    )


def placed(service: ServiceCommand, directory: Path, daemon: MpsDaemon | None) -> ServiceCommand:
    """The service with what puts it inside or outside MPS: a worker inside, if there is a daemon in `directory`."""
    if daemon is None or service.name == "scheduler":
        return replace(service, environment=outside_mps(directory))
    return replace(service, environment=daemon.environment)


def free_address(address: str, *, field: str) -> str:
    """The address, with a port in place of port 0. Raises AddressInUseError naming `field` when a server is there.

    Asked before a service is started there: a stranger's must not pass for ours, and the answer comes at once.
    """
    with Listener.claim(address, field=field) as listener:
        return listener.address


def dialled(listen: str) -> str:
    """Address for a client on this host of a server that listens there: the loopback in place of a wildcard."""
    address = parse_address(listen)
    if isinstance(address, TcpAddress) and address.host in _LOOPBACK_OF:
        return str(TcpAddress(_LOOPBACK_OF[address.host], address.port))
    return str(address)
