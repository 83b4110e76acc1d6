"""What `slipstream up` runs: every setting, its default, and what it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.address import TcpAddress, UnixAddress, parse_address
from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.cli.model_choice import ModelChoice

DEFAULT_SERVER = "127.0.0.1:50051"
"""Where `up` listens, and where `generate` and `status` look."""

DEVICES = ("auto", "cpu")

_SOCKET_FOLDER = "sockets"


def default_state_dir() -> Path:
    """The user's own, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "slipstream"


# Without slots, so that the command line can read the defaults from the class.
@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """The three services on one machine. Raises ConfigError naming the option that is wrong."""

    models: ModelChoice
    """What is served."""
    run_ahead: int = 1
    """Steps sent before the result of the first of them is known."""
    device: str = "auto"
    """What computes: auto or cpu."""
    threads: int | None = None
    """Threads that each worker computes with; None leaves it to the worker."""
    listen: str = DEFAULT_SERVER
    """Address for clients; port 0 takes a free one."""
    state_dir: Path = field(default_factory=default_state_dir)
    """Directory for sockets and logs, made if it is not there; one `up` at a time."""
    num_slots: int = 8
    """Requests that run at the same time."""
    context_tokens: int = 1024
    """Prompt and output of a request together have at most this many tokens."""
    kv_memory_mib: int = 512
    """Memory for the KV caches of draft and verify together, in MiB."""
    page_tokens: int = 16
    """Tokens in a KV page."""
    queue_capacity: int = 128
    """Requests that may wait; one more is refused."""
    chunk_tokens: int = 256
    """Prompt tokens in one prefill step at most."""
    ready_timeout_s: float = 300.0
    """Time for the models to load, in seconds."""
    drain_timeout_s: float = 30.0
    """Time for each service to finish its work when it is stopped, in seconds."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError("--device", self.device, f"{' or '.join(DEVICES)}; there is no CUDA backend yet")
        _in_range("--run-ahead", self.run_ahead, 0, 8)
        _in_range("--slots", self.num_slots, 1, 1024)
        _in_range("--context-tokens", self.context_tokens, 2, 2**20)
        _in_range("--kv-memory-mib", self.kv_memory_mib, 1, 2**24)
        _in_range("--page-tokens", self.page_tokens, 1, 1024)
        _in_range("--queue", self.queue_capacity, 0, 2**20)
        _in_range("--chunk-tokens", self.chunk_tokens, 1, 2**20)
        _in_range("--ready-timeout", self.ready_timeout_s, 1, 86400)
        _in_range("--drain-timeout", self.drain_timeout_s, 0, 86400)
        if self.threads is not None:
            _in_range("--threads", self.threads, 1, 1024)
        if not isinstance(parse_address(self.listen, field="--listen"), TcpAddress):
            raise ConfigError("--listen", self.listen, "HOST:PORT")
        parse_address(self.socket("verify"), field="--state-dir")

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the services that hold a model."""
        return ("verify",) if self.models.draft is None else ("verify", "draft")

    def socket(self, service: str) -> str:
        """gRPC address of a worker, in a folder that only this user can open."""
        return str(UnixAddress(self.state_dir.absolute() / _SOCKET_FOLDER / f"{service}.sock"))

    def log_path(self, service: str) -> Path:
        """What a service logs."""
        return self.state_dir.absolute() / f"{service}.log"


def _in_range(option: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(option, value, f"{low} to {high}")
