"""The command line that every service has, and what it does before anything heavy is imported."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from slipstream.common.errors import AddressInUseError, CheckpointError, ConfigError, SlipstreamError
from slipstream.common.rpc.access import AccessSettings, check_internal
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.logs import CONSOLE, FORMATS, LEVELS, configure_logging, escaped
from slipstream.common.settings import HELP_WIDTH, GroupedCommand, Settings, setting, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

logger = logging.getLogger(__name__)

WRONG_SETTINGS = 2
"""Exit status of a service whose settings or model are wrong: to start it again changes nothing."""


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings, heading="Logs"):
    """The level and the format of a service's log."""

    log_level: str = setting("INFO", help="What is logged.", choices=LEVELS)
    log_format: str = setting(CONSOLE, help="Lines for people, or a JSON object each.", choices=FORMATS)
    log_max_mib: int = setting(
        64, help="A log file of this size is renamed to FILE.1, and begun anew.", unit="N", low=1, high=2**20
    )


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(LogSettings, heading="Service"):
    """The address and the metrics port of a service, and its log settings."""

    listen: str = setting(help="unix:PATH, in a directory that only this user opens.", unit="ADDRESS")
    metrics_port: int = setting(0, help="Prometheus port; 0 is any free one.", unit="PORT", low=0, high=65535)
    metrics_host: str = setting(
        "127.0.0.1",
        help="Address of the metrics, for everyone who reaches it: 0.0.0.0 in a pod, whose network is its own.",
        unit="HOST",
    )
    log_file: Path | None = setting(
        None, help="Takes the log, and all other output.", unit="FILE", unset="standard error"
    )


def serve(
    name: str, kind: type[T], values: Mapping[str, Any], run: Callable[[T, Listener, ServiceOptions], int]
) -> NoReturn:
    """Claims the address, then calls `run` with settings of `kind`, and exits with the status that it returns.

    `values` has the settings and the options. A service whose settings are no `AccessSettings` is internal, and listens
    on a Unix socket only. An error of ours, or of the operating system, is one line, with the status of `report`.
    """
    try:
        options = shared(ServiceOptions, {**values, "log_level": values["log_level"].upper()})
        max_bytes = options.log_max_mib * 2**20
        configure_logging(name, options.log_level, options.log_format, log_file=options.log_file, max_bytes=max_bytes)
        config = shared(kind, values)
        is_shared = False
        if isinstance(config, AccessSettings):
            config.check_address(options.listen)
            is_shared = config.shares_port
        else:
            check_internal(options.listen)
        take = Listener.join if is_shared else Listener.claim
        with take(options.listen, field="listen") as listener:
            sys.exit(run(config, listener, options))
    except SlipstreamError as error:
        sys.exit(report(name, error))
    except OSError as error:
        logger.debug("ended by an error of the operating system", exc_info=True)
        sys.exit(report(name, error))


def report(name: str, error: Exception) -> int:
    """Prints the error that ends a service. Returns the exit status: `WRONG_SETTINGS`, or 1 for what may pass."""
    with suppress(OSError):  # the disk that the log is on may be full
        print(f"slipstream-{name}: {escaped(str(error))}", file=sys.stderr)
    is_wrong = isinstance(error, (ConfigError, CheckpointError)) and not isinstance(error, AddressInUseError)
    return WRONG_SETTINGS if is_wrong else 1


def run_command(command: Callable[..., None]) -> None:
    """Runs a service's command line, with plain help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=GroupedCommand, context_settings=HELP_WIDTH)(command)
    app()
