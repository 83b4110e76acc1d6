"""The configuration and load of a server, as `GetServerInfo` answers, and as a scheduler tells its gateways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from slipstream.common.messages import decode, encode
from slipstream.protos import generation_pb2, scheduler_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A service of the server."""

    name: str
    """ "gateway", or "gateway-0" and so on; "scheduler", "draft" or "verify"."""
    address: str
    pid: int
    metrics_port: int = 0
    """Port of its Prometheus endpoint; 0 if it has none."""
    model: str = ""
    """Name of its model; empty if it has none."""
    device: str = ""
    """Device that it computes on."""
    shared_weight_bytes: int = 0
    """Of the target's weights that a draft reads where verify has them, in place of copies of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The whole server at one moment."""

    version: str
    model: str
    """The target model's directory name."""
    vocab_size: int
    """Token ids are below it."""
    context_tokens: int
    """Prompt and output together have at most this many."""
    algorithm: str
    """ "standalone", "eagle3", "eagle", "mtp", "ngram" or a drafter's own word; "none" when nothing drafts."""
    num_draft_tokens: int
    run_ahead: int
    """Steps that are sent before the result of the first of them is known, less one."""
    num_slots: int
    """Requests that run at the same time."""
    page_tokens: int
    num_pages: int
    num_free_pages: int
    queue_capacity: int
    """Requests that may wait."""
    num_waiting: int
    num_running: int
    epoch: int
    """Grows with each attachment to the workers."""
    services: tuple[ServiceState, ...]
    """The gateways, the scheduler and the workers attached now. A gateway that does not answer has the pid 0."""
    fence: str
    """ "host" on a CPU; "timeline" or "event" on a GPU."""
    under_mps: bool = False
    """True if the workers share the GPU under NVIDIA MPS."""
    draft_state: str = ""
    """ "attached", "resting", "catching up" or "missing"; empty where no draft is expected."""
    draft_state_seconds: float = 0.0
    """Since it began; while the draft rests, since it was attached."""
    draft_problem: str = ""
    """While it is missing: why the last one left or was refused."""
    num_preemptions: int = 0
    """Times in this epoch that a running request gave its pages back for want of pages."""
    max_batched_tokens: int = 0
    """Tokens of a step that decodes and takes in prompts."""
    served_names: tuple[str, ...] = ()
    """Names under which clients may ask for the model."""
    tool_call_format: str = ""
    """Form in which the chat template has calls of tools; empty if it has none that is known."""
    reasoning_format: str = ""
    """Form in which it has the assistant's thoughts; empty if it has none that is known."""

    def to_pb(self) -> generation_pb2.GetServerInfoResponse:
        return encode(generation_pb2.GetServerInfoResponse, self)

    @classmethod
    def from_pb(cls, message: generation_pb2.GetServerInfoResponse) -> ServerState:
        return decode(cls, message, {"services": partial(decode, ServiceState)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerDescription:
    """The state of a scheduler's server, and what a gateway needs to prepare requests for it."""

    server: ServerState
    """Its `services` are the processes from the scheduler on."""
    tokenizer_path: str
    """Directory with the model's tokenizer, on this host."""
    eos_token_ids: tuple[int, ...]
    """Token ids with which the model ends a sequence."""
    max_sequences: int
    """Sequences that it holds at most, waiting and running, of all gateways together."""
    most_draft_tokens: int
    """The most draft tokens of a step that a request may ask for, whether a draft is attached or not."""

    def to_pb(self) -> scheduler_pb2.SchedulerDescription:
        return encode(scheduler_pb2.SchedulerDescription, self)

    @classmethod
    def from_pb(cls, message: scheduler_pb2.SchedulerDescription) -> SchedulerDescription:
        return decode(cls, message, {"server": ServerState.from_pb})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Says if a scheduler can run sequences. A change ends all that were submitted before."""

    serving: SchedulerDescription | None = None
    """Set while sequences can run."""
    paused: str = ""
    """Otherwise why not, for people."""
    is_final: bool = False
    """True if it will never serve again."""

    def to_pb(self) -> scheduler_pb2.SchedulerState:
        return encode(scheduler_pb2.SchedulerState, self)

    @classmethod
    def from_pb(cls, message: scheduler_pb2.SchedulerState) -> SchedulerState:
        return decode(cls, message, {"serving": SchedulerDescription.from_pb})
