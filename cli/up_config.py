"""The settings of `slipstream up`, and the settings, addresses and command lines of its services, which follow."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import TYPE_CHECKING, Any

from slipstream.cli.models import ModelChoice  # noqa: TC001 - `with_options` reads the annotations
from slipstream.cli.mps import MpsMode, has_nvidia_device, outside_mps
from slipstream.cli.process import HTTP, ServiceCommand
from slipstream.cli.state_dir import default_state_dir
from slipstream.common.errors import AddressInUseError, ConfigError
from slipstream.common.rpc.address import TcpAddress, UnixAddress, parse_address
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.service_options import LogSettings, ServiceOptions
from slipstream.common.settings import Settings, arguments, duration, setting, shared
from slipstream.common.wire.step import RowTokens
from slipstream.door.config import NOT_OF_A_DOOR, DoorConfig, FormSettings
from slipstream.gateway.config import LISTEN, GatewayConfig, GatewaySettings, gateway_name
from slipstream.scheduler.config import SchedulerConfig, ServingSettings
from slipstream.services.grammar.config import GrammarConfig
from slipstream.services.worker.config import NGRAM, PROMPT_LOOKUP, STANDALONE, ComputeSettings, WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.cli.mps import MpsDaemon

DETERMINISTIC_STEP_TOKENS = 512
"""Token budget of a step with `deterministic`, if max_batched_tokens is auto."""
METRICS_PORT = 9401
"""The scheduler's port in deploy/prometheus."""
IN_ORDER_OF_PORTS = ("scheduler", "verify", "draft", "gateway", "door", "grammar")
"""Services in the order of their consecutive metrics ports; more gateways and doors come before the grammar worker."""
LOOPBACK = "127.0.0.1"
"""Address of the metrics ports."""
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_SOCKET_FOLDER = "sockets"


@dataclass(frozen=True, kw_only=True)
class RestartSettings(Settings, heading="Restarts"):
    """When `up` starts a service again, and when it gives up."""

    max_restarts: int = setting(
        5,
        help="Restarts of a service within --restart-window-s; with the next death `up` ends. A draft waits for room.",
        unit="N",
        low=0,
        high=1_000_000,
    )
    restart_window_s: float = duration(300.0, help="Time in which the restarts are counted.")
    hang_timeout_s: float = duration(
        10.0, help="Time without an answer to a health check after which a service is killed and started again."
    )


@dataclass(frozen=True, kw_only=True)
class UpConfig(
    ServingSettings, GatewaySettings, ComputeSettings, FormSettings, RestartSettings, LogSettings, heading="Server"
):
    """The four services on one machine. Raises ConfigError naming the setting that is wrong."""

    models: ModelChoice
    """The target and the draft that are served."""
    draft_instance: str = "draft"
    """Name of the draft's socket and log: a new draft is started beside the old one."""
    swapped_draft_tokens: int | None = None
    """Draft tokens in a step after a swap that named a number; at most those of `models`."""
    listen: str = setting(LISTEN, help="HOST:PORT or unix:PATH for clients; port 0 takes a free one.", unit="ADDRESS")
    state_dir: Path = setting(
        default_factory=default_state_dir,
        help="Directory for sockets, logs and the journal of jobs, made if need be; one `up` at a time.",
        unit="DIR",
    )
    metrics_port: int | None = setting(
        None,
        help="Prometheus port of the scheduler, on loopback; the others' follow; 0: any.",
        unit="PORT",
        low=0,
        high=2**16 - len(IN_ORDER_OF_PORTS),
        unset=f"{METRICS_PORT}, and free ones with port 0 in --listen",
    )
    openai_port: int | None = setting(
        None,
        help="Port of OpenAI's interface, on loopback; 0 takes a free one.",
        unit="PORT",
        low=0,
        high=65535,
        unset="none",
    )
    openai_listen: str | None = setting(
        None, help="HOST:PORT of OpenAI's interface, in place of --openai-port.", unit="ADDRESS", unset="none"
    )
    openai_workers: int = setting(1, help="Processes that serve OpenAI's interface.", unit="N", low=1, high=64)
    constraints: str = setting(
        "auto",
        help="Whether a grammar worker makes the masks of requests with constraints; auto does where llguidance is "
        "installed.",
        choices=("auto", "on", "off"),
    )
    ready_timeout_s: float = duration(300.0, help="Time for the models to load.")
    drain_timeout_s: float = duration(GatewayConfig.grace_s, help="Time for running requests to finish when stopped.")
    mps: str = setting(
        MpsMode.AUTO.value, help="Whether the workers share the GPU under NVIDIA MPS.", choices=tuple(MpsMode)
    )
    deterministic: bool = setting(
        False, help="On a GPU: the same tokens in any batch, with a draft and without. There is no prefix cache then."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_address(self.listen)
        for name in ("scheduler", *self.gateway_names):
            parse_address(self.socket(name), field="state_dir")
        if self.gateways > 1 and not isinstance(parse_address(self.listen), TcpAddress):
            raise ConfigError("gateways", self.gateways, "1 with unix:PATH in --listen")
        if self.metrics_port_of("grammar") >= 2**16:
            raise ConfigError("metrics_port", self.metrics_port, "a port with room for all services' below 65536")
        if self.mps == MpsMode.ON and self.device == "cpu":
            raise ConfigError("mps", self.mps, "auto or off on a CPU")
        if self.constraints == "on" and find_spec("llguidance") is None:
            accepted = "auto or off without the extra, slipstream-serve[constraints]"
            raise ConfigError("constraints", self.constraints, accepted)
        self._check_openai()
        for worker in self.workers:
            self.worker(worker)
        _ = self.scheduler, self.gateway(0)

    @property
    def has_grammars(self) -> bool:
        """True if a grammar worker is started."""
        return self.constraints == "on" or (self.constraints == "auto" and find_spec("llguidance") is not None)

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the services that hold a model."""
        return ("verify", "draft") if self.models.has_draft else ("verify",)

    def worker(self, name: str) -> WorkerConfig:
        """Settings of the "verify" or the "draft" service."""
        models = self.models
        # Prompt lookup's settings are for the draft of a later swap, too.
        lookup = {} if name == "draft" and models.algorithm == NGRAM else PROMPT_LOOKUP
        if name == "verify":
            width = self.scheduler.draft_tokens(RowTokens.WHOLE) + 1 if self.deterministic else None
            return shared(WorkerConfig, self, model=models.target, deterministic_width=width, **lookup)
        target = None if models.algorithm == STANDALONE else models.target
        chosen = {"model": models.draft, "algorithm": models.algorithm, "target": target}
        only_verify = {"simulate_accept_length": None, "simulate_accept_by_position": None, "tensor_parallel_size": 1}
        return shared(WorkerConfig, self, **only_verify, **chosen, **lookup)

    @property
    def scheduler(self) -> SchedulerConfig:
        """Settings of the scheduler."""
        return shared(
            SchedulerConfig,
            self,
            verify=self.socket("verify"),
            draft=self.socket(self.draft_instance) if self.models.has_draft else None,
            grammar=self.socket("grammar") if self.has_grammars else None,
            num_draft_tokens=self.models.num_draft_tokens,
            # The gateways refuse more. Beside the sequences that wait and run, some have ended, or were cancelled.
            max_sequences=max(SchedulerConfig.max_sequences, 2 * (self.queue + self.slots)),
            # Then every prefill step is padded to a whole chunk, for a short prompt, too.
            max_batched_tokens=self.max_batched_tokens or (DETERMINISTIC_STEP_TOKENS if self.deterministic else None),
            # A page that decode steps have filled may be rounded otherwise than by the chunk of a prompt.
            no_prefix_cache=self.no_prefix_cache or self.deterministic,
            # For the router that asks a gateway for them.
            page_events=self.vllm_engine,
        )

    def gateway(self, index: int) -> GatewayConfig:
        """Settings of a gateway; it has a private address for several, for doors, and if clients need a key or TLS."""
        has_private = self.is_locked or self.gateways > 1 or self.openai_address is not None
        private = self.socket(self.gateway_names[index]) if has_private else None
        return shared(
            GatewayConfig,
            self,
            gateway_index=index,
            private_listen=private,
            scheduler=self.socket("scheduler"),
            state_dir=self.state_dir.absolute(),
            grace_s=self.drain_timeout_s,
        )

    @property
    def is_locked(self) -> bool:
        """True if clients need a key or TLS."""
        return self.has_tls or self.api_keys is not None

    @property
    def gateway_names(self) -> tuple[str, ...]:
        """The gateways, in order."""
        return ("gateway",) if self.gateways == 1 else tuple(map(gateway_name, range(self.gateways)))

    @property
    def mps_mode(self) -> MpsMode:
        """Mode of MPS on this host: OFF where the workers cannot be on a GPU."""
        is_possible = self.device != "cpu" and (self.mps == MpsMode.ON or has_nvidia_device())
        return MpsMode(self.mps) if is_possible else MpsMode.OFF

    @property
    def mps_dir(self) -> Path:
        """Pipes and logs of the MPS daemon."""
        return self.state_dir.absolute() / "mps"

    @property
    def openai_address(self) -> str | None:
        """Address of OpenAI's interface; None without it."""
        return self.openai_listen if self.openai_port is None else f"{LOOPBACK}:{self.openai_port}"

    @property
    def door_names(self) -> tuple[str, ...]:
        """The processes of OpenAI's interface, in order."""
        if self.openai_address is None:
            return ()
        return ("door",) if self.openai_workers == 1 else tuple(f"door-{i}" for i in range(self.openai_workers))

    def door(self, index: int) -> DoorConfig:
        """Settings of a door. It reaches a gateway at its private address, where a caller's key counts."""
        return shared(
            DoorConfig,
            self,
            gateway=self.socket(self.gateway_names[index % self.gateways]),
            asks_for_keys=self.api_keys is not None,
            workers=self.openai_workers,
            private_listen=self.socket(self.door_names[index]),
            grace_s=self.drain_timeout_s,
            read_timeout_s=self.read_timeout_s,
            **{name: getattr(DoorConfig, name) for name in NOT_OF_A_DOOR},
        )

    def _check_openai(self) -> None:
        address = self.openai_address
        if address is None:
            return
        if self.openai_port is not None and self.openai_listen is not None:
            raise ConfigError("openai_listen", self.openai_listen, "none beside --openai-port")
        if find_spec("uvicorn") is None:
            raise ConfigError("openai_port", address, "none without the extra, slipstream-serve[openai]")
        self.check_address(address, field="openai_listen")
        if not isinstance(parse_address(address, field="openai_listen"), TcpAddress):
            raise ConfigError("openai_listen", address, "HOST:PORT")
        _ = self.door(0)

    def metrics_port_of(self, service: str) -> int:
        """Port of a service's metrics; 0 for any free one."""
        first = first_metrics_port(self.metrics_port, self.listen)
        return first and first + self._in_order_of_ports.index(service)

    @property
    def _in_order_of_ports(self) -> tuple[str, ...]:
        first, *others = self.gateway_names
        first_door, *other_doors = self.door_names or ("door",)
        *workers, _, _, last = IN_ORDER_OF_PORTS
        return (*workers, first, first_door, *others, *other_doors, last)

    def check_metrics_ports(self) -> None:
        """Raises ConfigError unless the metrics port of each service is free; it names the first that is not."""
        grammars = ["grammar"] if self.has_grammars else []
        services = {"scheduler", *self.workers, *self.gateway_names, *self.door_names, *grammars}
        for name in self._in_order_of_ports:
            port = self.metrics_port_of(name) if name in services else 0
            try:
                free_address(f"{LOOPBACK}:{port}", field="metrics_port")
            except AddressInUseError as error:
                accepted = f"a port that is free, as those after it; another process serves at {port}, for {name}"
                raise ConfigError("metrics_port", self.metrics_port_of("scheduler"), accepted) from error

    def socket(self, service: str) -> str:
        """gRPC address of a worker or the scheduler, in a folder that only this user can open."""
        return str(UnixAddress(self.state_dir.absolute() / _SOCKET_FOLDER / f"{service}.sock"))

    def log_path(self, service: str) -> Path:
        """Log file of a service."""
        return self.state_dir.absolute() / f"{service}.log"


def first_metrics_port(metrics_port: int | None, listen: str) -> int:
    """The scheduler's metrics port by the options of `up`; 0 for any free one."""
    if metrics_port is not None:
        return metrics_port
    address = parse_address(listen)
    return METRICS_PORT if isinstance(address, TcpAddress) and address.port else 0


def worker_command(config: UpConfig, name: str) -> ServiceCommand:
    """Returns the command of "verify" or "draft". The other services serve without a draft."""
    instance = config.draft_instance if name == "draft" else name
    module, more = f"slipstream.services.{name}_main", {"is_optional": name == "draft"}
    return _command(config, name, module, config.socket(instance), config.worker(name), instance, **more)


def grammar_commands(config: UpConfig) -> list[ServiceCommand]:
    """Returns the command of the grammar worker, if there is one. The other services serve without."""
    if not config.has_grammars:
        return []
    module, address = "slipstream.services.grammar_main", config.socket("grammar")
    return [_command(config, "grammar", module, address, GrammarConfig(), is_optional=True)]


def scheduler_command(config: UpConfig) -> ServiceCommand:
    """Returns the scheduler's command."""
    return _command(config, "scheduler", "slipstream.scheduler.main", config.socket("scheduler"), config.scheduler)


def gateway_commands(config: UpConfig, listen: str) -> list[ServiceCommand]:
    """Returns the gateways' commands, for clients at `listen`, whose port is not 0.

    Each of several gateways has its own socket for health checks: at `listen` any of them may answer.
    """
    commands = []
    for index, name in enumerate(config.gateway_names):
        settings = config.gateway(index)
        address = settings.private_listen or dialled(listen)
        commands.append(_command(config, name, "slipstream.gateway.main", listen, settings, address=address))
    return commands


def server_address(config: UpConfig, listen: str) -> str:
    """Returns the address at which `up` and --state-dir reach a gateway: private if clients need a key or TLS."""
    return config.socket(config.gateway_names[0]) if config.is_locked else dialled(listen)


def door_commands(config: UpConfig, listen: str) -> list[ServiceCommand]:
    """Returns the commands of OpenAI's interface at `listen`; each process has its own socket for health checks."""
    commands = []
    for index, name in enumerate(config.door_names):
        address = f"{HTTP}{config.socket(name)}"
        commands.append(_command(config, name, "slipstream.door.main", listen, config.door(index), address=address))
    return commands


def _command(
    config: UpConfig, name: str, module: str, listen: str, settings: Settings, instance: str = "", **more: Any
) -> ServiceCommand:
    """`instance`: whose log it writes, if not that of `name`. `more`: further fields of the command."""
    log_path = config.log_path(instance or name)
    metrics_port = config.metrics_port_of(name)
    options = shared(ServiceOptions, config, listen=listen, metrics_port=metrics_port, log_file=log_path)
    # -P, so that the working directory shadows no import.
    argv = (sys.executable, "-P", "-m", module, *arguments(options), *arguments(settings))
    return ServiceCommand(name=name, argv=argv, log_path=log_path, restarts=True, **{"address": dialled(listen)} | more)


def placed(service: ServiceCommand, directory: Path, daemon: MpsDaemon | None) -> ServiceCommand:
    """Returns the command inside or outside MPS: a worker inside, if there is a daemon in `directory`.

    Workers under MPS are a group: a worker that dies at work on the GPU breaks the other worker's context.
    """
    if daemon is None or service.name.partition("-")[0] not in ("verify", "draft"):
        return replace(service, environment={**service.environment, **outside_mps(directory)})
    return replace(service, environment=daemon.environment, group="workers")


@contextmanager
def held_address(address: str, num_processes: int, *, field: str) -> Iterator[str]:
    """Yields an address, with a port in place of port 0; holds it for the processes that are to share it.

    Raises AddressInUseError naming `field` when a server is there.
    """
    if num_processes == 1:
        yield free_address(address, field=field)
        return
    with Listener.claim(address, field=field, is_shared=True) as listener:
        yield listener.address


def free_address(address: str, *, field: str) -> str:
    """Returns the address, with a port in place of port 0. Raises AddressInUseError naming `field` if it is taken.

    Called before a service is started there: a stranger's server must not pass for ours.
    """
    with Listener.claim(address, field=field) as listener:
        return listener.address


def dialled(listen: str) -> str:
    """Returns the address for a client on this host: the loopback in place of a wildcard."""
    address = parse_address(listen)
    if isinstance(address, TcpAddress) and address.host in _LOOPBACK_OF:
        return str(TcpAddress(_LOOPBACK_OF[address.host], address.port))
    return str(address)
