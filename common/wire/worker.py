"""The contract with a worker: its description, its attachment and its commands as plain data, and as protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch

from slipstream.common.errors import ConfigError, InvalidArgumentError, ManifestError, MismatchError
from slipstream.common.wire.layout import LENT_WEIGHTS, BufferName, DraftShape, EpochShape
from slipstream.common.wire.manifest import DTYPES, Manifest
from slipstream.common.wire.messages import decode, encode
from slipstream.common.wire.sequence import MAX_TOP_LOGPROBS, SamplingParams
from slipstream.common.wire.step import (
    PROTOCOL_VERSION,
    FenceName,
    FenceOps,
    FencePoint,
    FenceWait,
    GrammarRow,
    PrefillChunk,
    Role,
    RowTokens,
    SlotUpdate,
    StepCommand,
    WaitPlace,
)
from slipstream.protos import worker_pb2 as pb

if TYPE_CHECKING:
    from slipstream.common.wire.layout import StepShape

LARGEST_EPOCH = 2**63 - 1
"""The largest number of an epoch and of an attachment: words of a step have 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A worker's memory and its needs on its device, in bytes; all 0 where it is the host's."""

    total: int = 0
    free: int = 0
    """Free when this was asked."""
    weights: int = 0
    """Taken by the model's weights."""
    work: int = 0
    """Needs of an epoch beside KV pages and the steps' own tokens: graphs, libraries' workspaces."""
    work_per_token: int = 0
    """Needs of an epoch for each token of its largest step."""
    work_per_choice: int = 0
    """Needs of an epoch for each token that is chosen in its largest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """A worker, with everything that it must have in common with the other worker."""

    role: Role
    device: str
    """"cpu", or the GPU's UUID."""
    vocab_size: int
    tokenizer_sha256: str
    dtype: str
    max_context_tokens: int
    """Verify's is the server's limit, a draft's that of drafting; 0 for a draft without one."""
    kv_bytes_per_token: int
    model: str
    """Name, for people."""
    pid: int
    protocol_version: int = PROTOCOL_VERSION
    metrics_port: int = 0
    hidden_width: int = 0
    hidden_layers: tuple[int, ...] = ()
    """The target's layers whose inputs a draft reads, side by side, or FINAL_NORM; empty if verify chooses them."""
    algorithm: str = ""
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_path: str = ""
    under_mps: bool = False
    """True if it shares the GPU under NVIDIA MPS."""
    last_epoch: int = 0
    """The largest epoch that it was attached to."""
    memory: DeviceMemory = DeviceMemory()
    pid_namespace: str = ""
    """The target of `/proc/self/ns/pid`; empty if unknown."""
    shm_device: int = 0
    """Number of the device at /dev/shm; 0 if unknown."""
    has_paged_kv: bool = False
    """True if all that it knows of a sequence lies in its KV pages, so that it may begin with pages of another one."""
    tokens_ahead: int = 0
    """Tokens after a position that a draft's keys and values there depend on; 0 is 1 if it reads hidden states."""
    max_draft_tokens: int = 0
    """Draft: the most tokens that it drafts in a step, K of its attachments at most; 0: any number."""
    takes_mixed_steps: bool = False
    """True if a step of this verify may decode and take in prompts."""
    takes_ragged_steps: bool = False
    """True if the rows of a step may have different numbers of draft tokens; else see `row_tokens`."""
    takes_even_steps: bool = False
    """True if all rows of a step may have one of EVEN_DRAFT_TOKENS below K; see `RowTokens`."""
    has_scheduler: bool = False
    """True if a scheduler has its stream of commands."""
    shared_weight_bytes: int = 0
    """Draft: of the target's weights that it reads where verify has them, in place of copies of its own."""
    takes_masks: bool = False
    """Verify: True if it applies the masks of a grammar worker."""
    weights: Manifest | None = None
    """Verify: the embedding and output that it lends to drafts; None if it lends nothing."""

    @property
    def row_tokens(self) -> RowTokens:
        """How the numbers of draft tokens of a step's rows may differ."""
        if self.takes_ragged_steps:
            return RowTokens.RAGGED
        return RowTokens.EVEN if self.takes_even_steps else RowTokens.WHOLE

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        return DTYPES[self.dtype]

    def check_version(self) -> None:
        """Raises MismatchError for a worker that speaks another version of the contract than this process."""
        if self.protocol_version != (ours := self.role.protocol_version):
            found = f"{self.role.value} speaks {self.protocol_version}, this scheduler {ours}"
            raise MismatchError([f"protocol version: {found} (run the same release of both)"])

    def check_fits(self, other: WorkerDescription) -> None:
        """Raises a MismatchError that names all differences that must not be.

        Vocabulary sizes may differ, by padding: the tokenizer says what the ids mean.
        """
        pairs = (
            ("protocol version", self.protocol_version, other.protocol_version),
            ("device", self.device, other.device),
            ("tokenizer (SHA-256)", self.tokenizer_sha256, other.tokenizer_sha256),
            ("dtype", self.dtype, other.dtype),
        )
        differences = [
            f"{what}: {self.role.value} has {mine!r}, {other.role.value} has {theirs!r}"
            for what, mine, theirs in pairs
            if mine != theirs
        ]
        if differences:
            raise MismatchError(differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """Properties of a draft that verify's work depends on."""

    num_draft_tokens: int
    """K, at least 1."""
    hidden_width: int = 0
    """Width of the hidden states that it reads; 0 if it reads none."""
    hidden_layers: tuple[int, ...] = ()
    """The target's layers whose inputs it reads, or FINAL_NORM; empty if verify chooses them."""

    def shape(self, epoch: StepShape, hidden_dtype: torch.dtype) -> DraftShape:
        """Returns the sizes of the memory between the draft and verify. `hidden_dtype`: of verify's hidden states."""
        return DraftShape(
            num_slots=epoch.num_slots,
            run_ahead=epoch.run_ahead,
            num_draft_tokens=self.num_draft_tokens,
            chunk_tokens=epoch.chunk_tokens,
            hidden_width=self.hidden_width,
            hidden_dtype=hidden_dtype,
        )


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step that decodes and takes in prompts, as verify measured them."""

    num_tokens: int
    doubling_context: int | None = None
    """Context length from which a prompt token costs two tokens of a step, as it takes longer. None: never."""


class StepCost(NamedTuple):
    """The time of a worker's part of a step."""

    rows: int
    draft_tokens: int
    """Draft tokens of each row. 0: verify's part of a plain step; of a draft, a step that only takes in the stash."""
    ns: int


LONGEST_COST_NS, MOST_COSTS = 10**10, 1024
"""The longest time that counts, in ns, and the most times of a worker that are looked at."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of a worker, made when it was attached."""

    step_tokens: StepTokens | None = None
    """Verify's; None if it did not measure them."""
    costs: tuple[StepCost, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """One epoch of a worker: the memory it shares and the sizes it works with. For a draft, its attachment."""

    epoch: int
    """The number of the epoch; for a draft that of its attachment."""
    manifest: Manifest
    """The memory that the worker writes to: the results, or a draft's own."""
    shape: EpochShape | DraftShape
    """EpochShape for verify, DraftShape for a draft."""
    page_tokens: int
    num_pages: int
    """Page 0 (padding) included."""
    slot_pages: int
    """Pages of a slot at most."""
    context_tokens: int
    given: Manifest | None = None
    """For a draft: the memory that verify writes for it."""
    peer: WorkerDescription | None = None
    """For a draft: verify."""
    results: Manifest | None = None
    """For a grammar worker: verify's results."""
    expected_draft: DraftSizes | None = None
    """For verify: the draft to prepare for."""
    measures_step_tokens: bool = False
    """For verify: measure how many tokens a step beside decoding may have."""
    longest_pause_ns: int = 0
    """For verify: the longest pause of sequences that decode, by which it measures; 0: its own default."""
    chooses_draft_tokens: bool = False
    """True if the draft tokens of each step are chosen: the worker measures how long steps take."""
    pid: int = 0
    """The process that is meant, by its own description; 0: any."""
    protocol_version: int = PROTOCOL_VERSION
    is_debug: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError naming the size that is out of range."""
        for name, value, low, high in (
            ("epoch", self.epoch, 1, LARGEST_EPOCH),
            ("num_slots", self.shape.num_slots, 2, 2**16),
            ("run_ahead", self.shape.run_ahead, 0, 64),
            ("num_draft_tokens", self.shape.num_draft_tokens, int(isinstance(self.shape, DraftShape)), 64),
            ("chunk_tokens", self.shape.chunk_tokens, 1, 2**20),
            ("page_tokens", self.page_tokens, 1, 2**16),
            ("num_pages", self.num_pages, 2, 2**31),
            ("slot_pages", self.slot_pages, 1, 2**24),
            ("context_tokens", self.context_tokens, 2, 2**24),
        ):
            if not low <= value <= high:
                raise ConfigError(f"attach.{name}", value, f"{low} to {high}")

    @property
    def measures_costs(self) -> bool:
        """True if the worker is to measure how long steps take; in debug mode that is not what they take otherwise."""
        return self.chooses_draft_tokens and not self.is_debug


def slot_pages(shape: EpochShape, *, context_tokens: int, page_tokens: int) -> int:
    """Returns the length of a slot's page list: a whole context and the tokens that run-ahead may write after it."""
    slack = (shape.run_ahead + 1) * (shape.num_draft_tokens + 1)
    return -(-(context_tokens + slack) // page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedRegion:
    """The memory between verify and a draft or a grammar worker, which verify maps beside its running steps."""

    epoch: int
    """Verify's."""
    attachment: int
    """Number of the other worker's attachment."""
    own: Manifest
    """The memory that the other worker writes."""
    given: Manifest
    """The memory that verify writes for it."""
    draft: DraftSizes | None = None
    """None for a grammar worker."""

    def __post_init__(self) -> None:
        """Raises ConfigError for an attachment that no command could name."""
        if not 1 <= self.attachment <= LARGEST_EPOCH:
            kind = "grammar" if self.draft is None else "draft"
            raise ConfigError(f"attach_{kind}.attachment", self.attachment, f"1 to {LARGEST_EPOCH}")


_Enum = TypeVar("_Enum", bound=Enum)

_SHAPE_FIELDS = ("num_slots", "num_draft_tokens", "run_ahead", "chunk_tokens")


def _enum(kind: type[_Enum], value: object, field: str, accepted: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(field, value, accepted) from None


def description_to_pb(description: WorkerDescription) -> pb.DescribeResponse:
    memory = encode(pb.DeviceMemory, description.memory) if description.memory.total else None
    return encode(pb.DescribeResponse, description, role=description.role.value, memory=memory)


def description_from_pb(message: pb.DescribeResponse) -> WorkerDescription:
    """Decodes a worker's description. Raises InvalidArgumentError for a role that does not exist, ManifestError."""
    role, memory = _enum(Role, message.role, "role", "draft or verify"), decode(DeviceMemory, message.memory)
    return decode(WorkerDescription, message, {"weights": _weights_from_pb}, role=role, memory=memory)


def _weights_from_pb(message: pb.Manifest) -> Manifest:
    weights = Manifest.from_pb(message)
    names = [placed.spec.name for placed in weights.buffers]
    if not set(names) <= set(LENT_WEIGHTS) or weights.fences:
        accepted = f"{' and '.join(LENT_WEIGHTS)}, without fences"
        raise ManifestError(f"weights: buffers {', '.join(names)}, {len(weights.fences)} fences, accepted: {accepted}")
    return weights


def attachment_to_pb(attachment: Attachment) -> pb.AttachRequest:
    return encode(
        pb.AttachRequest,
        attachment,
        peer=None if attachment.peer is None else description_to_pb(attachment.peer),
        debug=attachment.is_debug,
        **{name: getattr(attachment.shape, name) for name in _SHAPE_FIELDS},
    )


def attachment_from_pb(message: pb.AttachRequest) -> Attachment:
    """Decodes and checks an attachment: of a draft if it has `given`. Raises ManifestError, ConfigError and others."""
    manifest = Manifest.from_pb(message.manifest)
    given = Manifest.from_pb(message.given) if message.HasField("given") else None
    shape: EpochShape | DraftShape
    if given is None:
        shape = decode(EpochShape, message)
    else:
        width, dtype = hidden_of(given)
        shape = decode(DraftShape, message, hidden_width=width, hidden_dtype=dtype)
    attachment = decode(
        Attachment,
        message,
        {"peer": description_from_pb, "expected_draft": partial(decode, DraftSizes)},
        manifest=manifest,
        given=given,
        results=None,
        shape=shape,
        is_debug=message.debug,
    )
    if isinstance(shape, DraftShape) and given is not None:
        given.check_holds(shape.given_specs())
    manifest.check_holds(shape.own_specs() if isinstance(shape, DraftShape) else shape.specs())
    return attachment


def attached_to_pb(measured: Measurements | None, command_socket: str) -> pb.AttachResponse:
    """Encodes the answer to Attach. `measured`: None if nothing was. `command_socket`: empty for none."""
    answer = pb.AttachResponse(command_socket=command_socket)
    if measured is not None:
        answer.costs.extend(pb.StepCost(**cost._asdict()) for cost in measured.costs)
        if (tokens := measured.step_tokens) is not None:
            answer.step_tokens, answer.step_doubling_context = tokens.num_tokens, tokens.doubling_context or 0
    return answer


def measurements_from_pb(message: pb.AttachResponse) -> Measurements:
    """Decodes what a worker measured, without times that no step takes: a draft may answer anything."""
    tokens = StepTokens(message.step_tokens, message.step_doubling_context or None) if message.step_tokens else None
    costs = (StepCost(cost.rows, cost.draft_tokens, cost.ns) for cost in message.costs[:MOST_COSTS])
    return Measurements(tokens, tuple(cost for cost in costs if cost.rows and 0 < cost.ns <= LONGEST_COST_NS))


def hidden_of(given: Manifest) -> tuple[int, torch.dtype]:
    """Returns width and dtype of the hidden states in `given`; 0 and float32 if it has none."""
    names = (placed.spec for placed in given.buffers)
    hidden = next((spec for spec in names if spec.name == BufferName.HIDDEN_STATES), None)
    return (0, torch.float32) if hidden is None else (hidden.shape[-1], hidden.dtype)


def region_to_pb(region: OfferedRegion) -> pb.AttachDraftRequest | pb.AttachGrammarRequest:
    if region.draft is None:
        return encode(pb.AttachGrammarRequest, region)
    return encode(pb.AttachDraftRequest, region)


def region_from_pb(message: pb.AttachDraftRequest | pb.AttachGrammarRequest) -> OfferedRegion:
    """Decodes the memory between verify and another worker. Raises ManifestError."""
    own, given = Manifest.from_pb(message.own), Manifest.from_pb(message.given)
    draft = decode(DraftSizes, message.draft) if isinstance(message, pb.AttachDraftRequest) else None
    return decode(OfferedRegion, message, own=own, given=given, draft=draft)


def command_to_pb(command: StepCommand) -> pb.StepCommand:
    """Encodes a step. By hand, because it is done for each worker in each step."""
    message = pb.StepCommand(
        epoch=command.epoch,
        step=command.step,
        slots=command.slots,
        num_draft_tokens=command.num_draft_tokens,
        acknowledge=command.wants_acknowledgement,
        top_logprobs=command.top_logprobs,
        attachment=command.attachment,
        catches_up=command.catches_up,
        grammar=command.grammar,
        constrained=command.constrained,
        grammar_rows=[encode(pb.GrammarRow, row) for row in command.grammar_rows],
        consumed=command.consumed,
    )
    # Made in their place: what the constructor is given, it copies.
    for fence, value, place in command.ops.waits:
        message.waits.add(fence=cast("pb.Fence", fence), value=value, place=cast("pb.WaitPlace", place))
    for fence, value in command.ops.signals:
        message.signals.add(fence=cast("pb.Fence", fence), value=value)
    message.chunks.extend([encode(pb.PromptChunk, chunk) for chunk in command.chunks])
    for update in command.updates:
        message.updates.add(
            slot=update.slot,
            generation=update.generation,
            first_page_index=update.first_page_index,
            pages=update.pages,
            limit_tokens=update.limit_tokens,
            sampling=None if update.sampling is None else update.sampling.to_pb(),
            max_draft_tokens=update.max_draft_tokens,
            prompt_tokens=update.prompt_tokens,
            history_from=update.history_from,
            cached_tokens=update.cached_tokens,
            has_cache_salt=update.has_cache_salt,
        )
    return message


def command_from_pb(message: pb.StepCommand) -> StepCommand:
    """Decodes a step. Raises InvalidArgumentError for an impossible fence, place or number."""
    if message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgumentError("top_logprobs", message.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    return decode(
        StepCommand,
        message,
        {
            "chunks": partial(decode, PrefillChunk),
            "updates": _update_from_pb,
            "grammar_rows": partial(decode, GrammarRow),
        },
        ops=FenceOps(tuple(map(_wait_from_pb, message.waits)), tuple(map(_point_from_pb, message.signals))),
        wants_acknowledgement=message.acknowledge,
    )


def _update_from_pb(message: pb.SlotUpdate) -> SlotUpdate:
    return decode(SlotUpdate, message, {"sampling": SamplingParams.from_pb})


def _point_from_pb(message: pb.FencePoint) -> FencePoint:
    return FencePoint(_enum(FenceName, message.fence, "fence", "a fence"), message.value)


def _wait_from_pb(message: pb.FenceWait) -> FenceWait:
    """Decodes a wait. Raises InvalidArgumentError for a fence or a place that does not exist."""
    place = _enum(WaitPlace, message.place, "place", "a place in a step")
    return FenceWait(_enum(FenceName, message.fence, "fence", "a fence"), message.value, place)
