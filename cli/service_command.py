"""How each service is started: its command line, the address it serves at, and its log file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.common.rpc.address import TcpAddress, parse_address
from slipstream.common.rpc.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from slipstream.cli.up_config import UpConfig

LOOPBACK = "127.0.0.1"
"""Where metrics are served."""
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
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has beside this process's own, or in their place."""


def worker_command(config: UpConfig, name: str) -> ServiceCommand:
    """The "verify" or the "draft" service of a configuration."""
    worker = config.worker(name)
    options: dict[str, object] = {
        **_shared_options(config, name),
        "--model": worker.model,
        "--listen": config.socket(name),
        "--device": worker.device,
        "--dtype": worker.dtype,
        "--load-format": worker.load_format,
    }
    if worker.simulate_accept_length is not None:
        options["--simulate-accept-length"] = worker.simulate_accept_length
    if worker.deterministic_width is not None:
        options["--deterministic-width"] = worker.deterministic_width
    if name == "draft":
        options["--algorithm"] = worker.algorithm
    if worker.target is not None:
        options["--target"] = worker.target
    if worker.threads is not None:
        options["--threads"] = worker.threads
    return ServiceCommand(
        name=name,
        argv=python_module(f"slipstream.services.{name}.main", options),
        address=config.socket(name),
        log_path=config.log_path(name),
    )


def scheduler_command(config: UpConfig, listen: str) -> ServiceCommand:
    """The scheduler of a configuration, for clients at `listen`, whose port is not 0."""
    scheduler = config.scheduler
    options: dict[str, object] = {
        **_shared_options(config, "scheduler"),
        "--verify": scheduler.verify,
        "--listen": listen,
        "--run-ahead": scheduler.run_ahead,
        "--slots": scheduler.slots,
        "--page-tokens": scheduler.page_tokens,
        "--chunk-tokens": scheduler.chunk_tokens,
        "--queue": scheduler.queue,
        "--stream-interval-ms": scheduler.stream_interval_ms,
        "--kept-jobs": scheduler.kept_jobs,
        "--job-ttl-s": scheduler.job_ttl_s,
        "--read-timeout-s": scheduler.read_timeout_s,
        "--grace-s": scheduler.grace_s,
        "--device": scheduler.device,
        "--fence": scheduler.fence,
    }
    if scheduler.draft is not None:
        options |= {"--draft": scheduler.draft, "--num-draft-tokens": scheduler.num_draft_tokens}
    if scheduler.kv_memory_mib is not None:
        options["--kv-memory-mib"] = scheduler.kv_memory_mib
    if scheduler.context_tokens is not None:
        options["--context-tokens"] = scheduler.context_tokens
    return ServiceCommand(
        name="scheduler",
        argv=python_module("slipstream.scheduler.main", options),
        address=dialled(listen),
        log_path=config.log_path("scheduler"),
    )


def _shared_options(config: UpConfig, service: str) -> dict[str, object]:
    """What every service takes."""
    return {
        "--metrics-port": config.metrics_port_of(service),
        "--log-level": config.log_level,
        "--log-format": config.log_format,
    }


def free_address(address: str, *, field: str) -> str:
    """The address, with a port in place of port 0. Raises AddressInUseError naming `field` when somebody serves there.

    Asked before a service is started there: a stranger's must not pass for ours, and the answer comes at once.
    """
    with Listener.claim(address, field=field) as listener:
        return listener.address


def dialled(listen: str) -> str:
    """Where a client on this host finds a server that listens there: a wildcard stands for the loopback."""
    address = parse_address(listen)
    if isinstance(address, TcpAddress) and address.host in _LOOPBACK_OF:
        return str(TcpAddress(_LOOPBACK_OF[address.host], address.port))
    return str(address)


def python_module(module: str, options: dict[str, object]) -> tuple[str, ...]:
    """Command line of a module under this interpreter; -P, so that the working directory shadows no import."""
    words = (str(word) for option in options.items() for word in option)
    return (sys.executable, "-P", "-m", module, *words)
