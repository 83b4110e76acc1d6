"""The settings of a gateway process, and which of a server's gateways keeps a job."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.access import AccessSettings, check_internal
from slipstream.common.settings import duration, setting
from slipstream.gateway.journal_file import JournalMode

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTEN = "127.0.0.1:50051"
MAX_GATEWAYS = 64


class GenerationConfig(StrEnum):
    """The use of a model's `generation_config.json`, named as in vLLM."""

    AUTO = "auto"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Shard:
    """The jobs of one of a server's `count` gateways, counted from 0: those whose ids hash to its index."""

    index: int = 0
    count: int = 1

    def new_job_id(self) -> str:
        """Draws the id of a job of this shard."""
        while shard_of(job_id := secrets.token_hex(16), self.count) != self.index:
            pass
        return job_id

    def numbers_after(self, last: int) -> Iterator[int]:
        """Yields a number for each new job: microseconds since 1970, growing. No other gateway gives the same."""
        while True:
            now = time.time_ns() // 1000
            last = max(now - now % self.count + self.index, last + self.count)
            yield last


WHOLE = Shard()
"""All jobs: the shard of a server's only gateway."""


def shard_of(job_id: str, count: int) -> int:
    """Returns the index of the gateway, of `count`, that keeps a job: the same in every process."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big") % count


def gateway_name(index: int) -> str:
    """Returns the name of one of several gateways, of its log and of its socket."""
    return f"gateway-{index}"


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(AccessSettings, heading="Requests and jobs"):
    """The gateway's settings that `slipstream up` has, too, and passes on. Raises ConfigError naming the field."""

    gateways: int = setting(
        1,
        help="Gateways that share the clients' port; each takes its part of --queue.",
        unit="N",
        low=1,
        high=MAX_GATEWAYS,
    )
    queue: int = setting(
        256,
        help="Outputs that may wait for their first slot, n of a request; a request that brings more is refused.",
        unit="N",
        low=1,
        high=2**20,
    )
    stream_interval_ms: float | None = setting(
        None,
        help="A client gets a message at most this often.",
        unit="MS",
        low=0,
        high=10_000,
        unset="0 on a GPU, 5 on a CPU",
    )
    kept_jobs: int = setting(
        1000, help="Jobs that are kept after their end, to be watched and asked after.", unit="N", low=0, high=2**20
    )
    job_ttl_s: float = duration(600.0, help="How long they are kept, from the end or from the gateway's last start.")
    kept_mib: int = setting(256, help="Memory that they take at most.", unit="MIB", low=1, high=2**20)
    journal: str = setting(
        JournalMode.PROCESS.value,
        help="What requests and their output survive: nothing, the death of any process, the loss of power.",
        choices=tuple(JournalMode),
    )
    read_timeout_s: float = duration(30.0, help="A stream whose client reads nothing for so long is cut off.")
    outage_timeout_s: float = duration(
        60.0, help="A request that has had no scheduler for so long ends with UNAVAILABLE."
    )
    max_lost_epochs: int = setting(
        3,
        help="A request that ran when the scheduler or a worker was lost so often, without a token in between, fails.",
        unit="N",
        low=1,
        high=1000,
    )
    chat_template: Path | None = setting(
        None,
        help="A file with the chat template, Jinja.",
        unit="FILE",
        accepts=Path.is_file,
        accepted="a file that this user can read",
        unset="the model's",
    )
    generation_config: str = setting(
        GenerationConfig.AUTO.value,
        help="Sampling parameters of requests that name none: the model's generation_config.json's, or no such.",
        choices=tuple(GenerationConfig),
    )
    served_model_name: str | None = setting(
        None,
        help="Names under which clients ask for the model, with commas between.",
        unit="NAMES",
        accepts=lambda names: all(names.split(",")),
        accepted="names with commas between",
        unset="the name of its directory",
    )
    log_requests: bool = setting(False, help="Log a line for each request that ends.")
    compat_metrics: bool = setting(
        False, help="Have the metrics that routers read on the gateways' pages, under vLLM's names."
    )
    vllm_engine: bool = setting(False, help="Serve the vllm.grpc.engine.VllmEngine service, too: for the SMG gateway.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_engine and find_spec("smg_grpc_proto") is None:
            raise ConfigError("vllm_engine", True, "false without the extra, slipstream-serve[smg]")

    @property
    def shares_port(self) -> bool:
        return self.gateways > 1

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model for clients; empty for its own name."""
        return tuple(self.served_model_name.split(",")) if self.served_model_name else ()


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(GatewaySettings, heading="Gateway"):
    """The settings of a gateway. Checked when it is built; the command line takes its options from here."""

    scheduler: str = setting(help="Address of the scheduler, unix:PATH.", unit="ADDRESS")
    private_listen: str | None = setting(
        None, help="A second address, unix:PATH, with neither TLS nor keys, for this user.", unit="ADDRESS"
    )
    state_dir: Path | None = setting(
        None, help="Directory of the journal, which is there already.", unit="DIR", unset="no journal"
    )
    gateway_index: int = setting(
        0,
        help="Which of the gateways this is, from 0; they find each other beside --private-listen.",
        unit="N",
        low=0,
        high=MAX_GATEWAYS - 1,
    )
    grace_s: float = duration(30.0, help="After the first SIGTERM, running jobs may take this long.")

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field."""
        super().__post_init__()
        check_internal(self.scheduler, field="scheduler")
        if self.private_listen is not None:
            check_internal(self.private_listen, field="private_listen")
        if self.gateway_index >= self.gateways:
            raise ConfigError("gateway_index", self.gateway_index, f"0 to {self.gateways - 1}, with --gateways")
        if self.private_listen not in self.private_addresses[self.gateway_index :][:1] and self.gateways > 1:
            file = f"{gateway_name(self.gateway_index)}.sock"
            raise ConfigError("private_listen", self.private_listen, f"unix:DIR/{file}, with --gateways")
        if self.queue < self.gateways:
            raise ConfigError("queue", self.queue, f"{self.gateways} or more, one for each of the gateways")
        if self.state_dir is not None and self.journal != JournalMode.OFF:
            check_journals(self.state_dir, self.gateways)

    @property
    def shard(self) -> Shard:
        """Jobs that this gateway keeps."""
        return Shard(self.gateway_index, self.gateways)

    @property
    def own_queue(self) -> int:
        """This gateway's part of the queue."""
        return self.queue // self.gateways + (self.gateway_index < self.queue % self.gateways)

    @property
    def journal_path(self) -> Path | None:
        """The journal's file; None if jobs are kept in memory only."""
        return None if self.state_dir is None else self.state_dir / _journal_name(self.gateway_index, self.gateways)

    @property
    def private_addresses(self) -> tuple[str, ...]:
        """The private addresses of several gateways, in order; none for a single one."""
        if self.gateways == 1 or self.private_listen is None:
            return ()
        own = Path(self.private_listen.removeprefix("unix:"))
        return tuple(f"unix:{own.with_name(gateway_name(index))}.sock" for index in range(self.gateways))


def _journal_name(index: int, count: int) -> str:
    return "journal.sqlite3" if count == 1 else f"journal-{index}-of-{count}.sqlite3"


def check_journals(state_dir: Path, gateways: int) -> None:
    """Raises ConfigError if the journals in the directory are those of another number of gateways.

    Jobs that are in them belong to other gateways with another number, and would not be found.
    """
    expected = {_journal_name(index, gateways) for index in range(gateways)}
    for path in sorted(state_dir.glob("journal*.sqlite3")):
        if path.name not in expected:
            count = path.stem.rpartition("-of-")[2] if "-of-" in path.stem else "1"
            accepted = f"{count}, with which {path} was written; another number needs it removed, with its jobs"
            raise ConfigError("gateways", gateways, accepted)
