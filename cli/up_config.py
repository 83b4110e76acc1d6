"""What `slipstream up` runs: every setting, its default, and what it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.mps import MpsMode, has_nvidia_device
from slipstream.common.errors import ConfigError
from slipstream.common.rpc.address import TcpAddress, UnixAddress, parse_address
from slipstream.common.rpc.logs import CONSOLE, FORMATS, LEVELS
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.main import LISTEN
from slipstream.services.worker.config import EAGLE3, WorkerConfig

if TYPE_CHECKING:
    from slipstream.cli.model_choice import ModelChoice

DEFAULT_SERVER = LISTEN
"""Where `up` listens, and where `generate` and `status` look."""

METRICS_PORT = 9401
"""Where deploy/prometheus expects a scheduler's metrics."""
_METRICS_PORTS = ("scheduler", "verify", "draft")
"""Whose ports follow each other."""
_SOCKET_FOLDER = "sockets"


def default_state_dir() -> Path:
    """The user's own, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "slipstream"


# Without slots, so that the command line can read the defaults from the class.
@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """The three services on one machine. Raises ConfigError naming the setting that is wrong.

    What is a service's own setting has that service's default, and is checked by its configuration.
    """

    models: ModelChoice
    """What is served."""
    run_ahead: int = SchedulerConfig.run_ahead
    device: str = WorkerConfig.device
    fence: str = SchedulerConfig.fence
    mps: str = MpsMode.AUTO.value
    """Whether the workers share the GPU under NVIDIA MPS: "auto", "on" or "off"."""
    dtype: str = WorkerConfig.dtype
    load_format: str = WorkerConfig.load_format
    simulate_accept_length: float | None = WorkerConfig.simulate_accept_length
    deterministic: bool = False
    """On a GPU: whether a token is to be the same in any batch, with a draft of so many tokens and without."""
    threads: int | None = WorkerConfig.threads
    slots: int = SchedulerConfig.slots
    context_tokens: int | None = SchedulerConfig.context_tokens
    kv_memory_mib: int | None = SchedulerConfig.kv_memory_mib
    page_tokens: int = SchedulerConfig.page_tokens
    chunk_tokens: int = SchedulerConfig.chunk_tokens
    queue: int = SchedulerConfig.queue
    stream_interval_ms: float = SchedulerConfig.stream_interval_ms
    kept_jobs: int = SchedulerConfig.kept_jobs
    job_ttl_s: float = SchedulerConfig.job_ttl_s
    read_timeout_s: float = SchedulerConfig.read_timeout_s
    listen: str = DEFAULT_SERVER
    """Address for clients; port 0 takes a free one."""
    metrics_port: int | None = None
    """Port of the scheduler's metrics, on loopback; verify's is the next one, and draft's the one after. 0 takes free
    ones. None takes METRICS_PORT, or free ones where the port for clients is a free one, too."""
    log_level: str = "INFO"
    log_format: str = CONSOLE
    state_dir: Path = field(default_factory=default_state_dir)
    """Directory for sockets and logs, made if it is not there; one `up` at a time."""
    ready_timeout_s: float = 300.0
    """Time for the models to load, in seconds."""
    drain_timeout_s: float = SchedulerConfig.grace_s
    """Time for running requests to finish when the services are stopped, in seconds."""

    def __post_init__(self) -> None:
        if not isinstance(parse_address(self.listen, field="listen"), TcpAddress):
            raise ConfigError("listen", self.listen, "HOST:PORT")
        parse_address(self.socket("verify"), field="state_dir")
        if not 0 <= (self.metrics_port or 0) <= 65536 - len(_METRICS_PORTS):
            raise ConfigError("metrics_port", self.metrics_port, f"0 to {65536 - len(_METRICS_PORTS)}")
        for name, accepted in (("log_level", LEVELS), ("log_format", FORMATS)):
            if getattr(self, name) not in accepted:
                raise ConfigError(name, getattr(self, name), ", ".join(accepted))
        for name in ("ready_timeout", "drain_timeout"):
            value: float = getattr(self, f"{name}_s")
            if not 0 < value <= 86400:
                raise ConfigError(name, value, "above 0, to 86400 seconds")
        if self.mps not in list(MpsMode):
            raise ConfigError("mps", self.mps, ", ".join(MpsMode))
        if self.mps == MpsMode.ON and self.device == "cpu":
            raise ConfigError("mps", self.mps, "auto or off on a CPU")
        for worker in self.workers:
            self.worker(worker)
        _ = self.scheduler

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the services that hold a model."""
        return ("verify",) if self.models.draft is None else ("verify", "draft")

    def worker(self, name: str) -> WorkerConfig:
        """Settings of the "verify" or the "draft" service."""
        model = self.models.draft if name == "draft" else self.models.target
        assert model is not None, "a draft service without a draft"
        settings = WorkerConfig(
            model=model,
            device=self.device,
            dtype=self.dtype,
            load_format=self.load_format,
            threads=self.threads,
        )
        if name == "verify":
            width = self.models.num_draft_tokens + 1 if self.deterministic else None
            return replace(settings, simulate_accept_length=self.simulate_accept_length, deterministic_width=width)
        if self.models.algorithm == EAGLE3:
            return replace(settings, algorithm=EAGLE3, target=self.models.target)
        return settings

    @property
    def scheduler(self) -> SchedulerConfig:
        """Settings of the scheduler."""
        return SchedulerConfig(
            verify=self.socket("verify"),
            draft=None if self.models.draft is None else self.socket("draft"),
            num_draft_tokens=self.models.num_draft_tokens,
            run_ahead=self.run_ahead,
            slots=self.slots,
            context_tokens=self.context_tokens,
            kv_memory_mib=self.kv_memory_mib,
            page_tokens=self.page_tokens,
            chunk_tokens=self.chunk_tokens,
            queue=self.queue,
            stream_interval_ms=self.stream_interval_ms,
            kept_jobs=self.kept_jobs,
            job_ttl_s=self.job_ttl_s,
            read_timeout_s=self.read_timeout_s,
            grace_s=self.drain_timeout_s,
            device=self.device,
            fence=self.fence,
        )

    @property
    def mps_mode(self) -> MpsMode:
        """What to do about MPS on this host: nothing where the workers cannot be on a GPU."""
        is_possible = self.device != "cpu" and (self.mps == MpsMode.ON or has_nvidia_device())
        return MpsMode(self.mps) if is_possible else MpsMode.OFF

    @property
    def mps_dir(self) -> Path:
        """Pipes and logs of the MPS daemon."""
        return self.state_dir.absolute() / "mps"

    def metrics_port_of(self, service: str) -> int:
        """Where a service's metrics are; 0 for any free port."""
        port = self.metrics_port
        if port is None:
            listen = parse_address(self.listen)
            port = METRICS_PORT if isinstance(listen, TcpAddress) and listen.port else 0
        return port and port + _METRICS_PORTS.index(service)

    def socket(self, service: str) -> str:
        """gRPC address of a worker, in a folder that only this user can open."""
        return str(UnixAddress(self.state_dir.absolute() / _SOCKET_FOLDER / f"{service}.sock"))

    def log_path(self, service: str) -> Path:
        """What a service logs."""
        return self.state_dir.absolute() / f"{service}.log"
