"""How each service is started: its command line, the address it serves at, and its log file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.common.address import TcpAddress, parse_address

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.cli.up_config import UpConfig

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """One service to start."""

    name: str
    """What messages call it, and what its log is named for: "draft", "verify", "scheduler"."""
    argv: tuple[str, ...]
    """The command line, beginning with an absolute path."""
    address: str
    """gRPC target at which its health is asked, `unix:PATH` or `HOST:PORT`."""
    log_path: Path
    """Takes its standard output and error."""


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Command line of a module under this interpreter; -P, so that the working directory shadows no import."""
    return (sys.executable, "-P", "-m", module, *arguments)


def worker_command(config: UpConfig, name: str) -> ServiceCommand:
    """The "verify" or "draft" of a configuration."""
    model = config.models.draft if name == "draft" else config.models.target
    algorithm = ("--algorithm", config.models.algorithm) if name == "draft" else ()
    threads = () if config.threads is None else ("--threads", str(config.threads))
    return ServiceCommand(
        name=name,
        argv=python_module(
            f"slipstream.services.{name}.main",
            *algorithm,
            *("--model", str(model)),
            *("--listen", config.socket(name)),
            *("--device", config.device),
            *threads,
        ),
        address=config.socket(name),
        log_path=config.log_path(name),
    )


def scheduler_command(config: UpConfig, listen: str) -> ServiceCommand:
    """The scheduler of a configuration, for clients at `listen`, whose port is not 0."""
    draft = (
        ()
        if config.models.draft is None
        else ("--draft", config.socket("draft"), "--num-draft-tokens", str(config.models.num_draft_tokens))
    )
    return ServiceCommand(
        name="scheduler",
        argv=python_module(
            "slipstream.scheduler.main",
            *("--verify", config.socket("verify")),
            *draft,
            *("--listen", listen),
            *("--run-ahead", str(config.run_ahead)),
            *("--slots", str(config.num_slots)),
            *("--context-tokens", str(config.context_tokens)),
            *("--kv-memory-mib", str(config.kv_memory_mib)),
            *("--page-tokens", str(config.page_tokens)),
            *("--queue", str(config.queue_capacity)),
            *("--chunk-tokens", str(config.chunk_tokens)),
        ),
        address=dialled(listen),
        log_path=config.log_path("scheduler"),
    )


def dialled(listen: str) -> str:
    """Where a client on this host finds a server that listens there: a wildcard stands for the loopback."""
    address = parse_address(listen)
    if isinstance(address, TcpAddress) and address.host in _LOOPBACK_OF:
        return str(TcpAddress(_LOOPBACK_OF[address.host], address.port))
    return str(address)
