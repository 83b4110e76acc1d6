"""The state of a server, as `GetServerInfo` answers and a scheduler tells its gateways, and a swap of its draft."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.messages import decode, encode
from slipstream.protos import generation_pb2, scheduler_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A service of the server."""

    name: str
    """ "gateway", or "gateway-0" and so on; "scheduler", "draft", "verify" or "grammar"."""
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
class SamplingDefaults:
    """The sampling parameters of requests that do not name them; None: the interface's own default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """Returns the defaults that are set, by their names."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.given.items())


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
    sampling_defaults: SamplingDefaults | None = None
    """Sampling defaults of the model's `generation_config.json`; None: none, or they do not count."""

    def to_pb(self) -> generation_pb2.GetServerInfoResponse:
        return encode(generation_pb2.GetServerInfoResponse, self)

    @classmethod
    def from_pb(cls, message: generation_pb2.GetServerInfoResponse) -> ServerState:
        return decode(
            cls,
            message,
            {"services": partial(decode, ServiceState), "sampling_defaults": partial(decode, SamplingDefaults)},
        )


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
    constraints: bool = False
    """True if sequences may have a grammar."""

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


DEFAULT_JUDGE_STEPS, MAX_JUDGE_STEPS = 200, 1_000_000
DEFAULT_ROLLBACK_BELOW = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTerms:
    """The settings of a swap, for the new draft and for its judgement. Raises InvalidArgumentError."""

    num_draft_tokens: int | None = None
    """Tokens drafted in a step; None: the scheduler's."""
    judge_steps: int = DEFAULT_JUDGE_STEPS
    """Steps compared, before and after; 0 does not judge."""
    rollback_below: float = DEFAULT_ROLLBACK_BELOW
    """The draft before takes its place again if the new one has fewer than this many times its accepted tokens in a
    step, of the draft tokens that both have."""

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise InvalidArgumentError("num_draft_tokens", self.num_draft_tokens, "at least 1")
        if not 0 <= self.judge_steps <= MAX_JUDGE_STEPS:
            raise InvalidArgumentError("judge_steps", self.judge_steps, f"0 to {MAX_JUDGE_STEPS}")
        if not (math.isfinite(self.rollback_below) and self.rollback_below >= 0):
            raise InvalidArgumentError("rollback_below", self.rollback_below, "a number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSwap:
    """A request to a scheduler."""

    address: str
    """gRPC address of the draft service that is to draft; empty for none."""
    terms: SwapTerms = SwapTerms()

    def to_pb(self) -> scheduler_pb2.SwapDraftRequest:
        return encode(scheduler_pb2.SwapDraftRequest, self.terms, address=self.address)

    @classmethod
    def from_pb(cls, message: scheduler_pb2.SwapDraftRequest) -> DraftSwap:
        """Decodes and checks it. Raises InvalidArgumentError."""
        return cls(address=message.address, terms=decode(SwapTerms, message))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """The measurements of a draft over the compared steps. The means are 0 if no step was counted."""

    algorithm: str
    """ "none" when nothing drafted."""
    num_draft_tokens: int = 0
    num_steps: int = 0
    """Decode steps that were counted."""
    accept_length: float = 0.0
    """Tokens of a sequence in a step."""
    tokens_per_second: float = 0.0
    """Output tokens of all sequences together."""
    step_ms: float = 0.0
    """From a step to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOutcome:
    """The answer to a swap."""

    before: DraftFigures
    after: DraftFigures
    """The new draft's figures, also if it was taken off again."""
    rolled_back: bool = False
    """True if the new draft was taken off again; `reason` says why, and if the draft before does not draft yet."""
    reason: str = ""
    longest_pause_ms: float = 0.0
    """Longest time between two steps from the call to the answer; 0 if there were none."""

    def to_pb(self) -> scheduler_pb2.SwapDraftResponse:
        return encode(scheduler_pb2.SwapDraftResponse, self)

    @classmethod
    def from_pb(cls, message: scheduler_pb2.SwapDraftResponse) -> SwapOutcome:
        figures = partial(decode, DraftFigures)
        return decode(cls, message, {"before": figures, "after": figures})
