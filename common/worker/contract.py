"""Descriptions of a worker and of its attachment to a scheduler, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.common.device.manifest import DTYPES
from slipstream.common.errors import ConfigError, MismatchError
from slipstream.common.worker.layout import DraftShape

if TYPE_CHECKING:
    import torch

    from slipstream.common.device.manifest import Manifest
    from slipstream.common.worker.layout import EpochShape, StepShape
    from slipstream.common.worker.step import Role

PROTOCOL_VERSION = 4
"""Grows when a message of the worker contract changes its meaning."""
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
    """Tokens behind a position that a draft's keys and values there depend on; 0 is 1 if it reads hidden states."""
    takes_mixed_steps: bool = False
    """True if a step of this verify may decode and take in prompts."""
    has_scheduler: bool = False
    """True if a scheduler has its stream of commands."""
    shared_weight_bytes: int = 0
    """Draft: of the target's weights that it reads where verify has them, in place of copies of its own."""
    weights: Manifest | None = None
    """Verify: the embedding and output that it lends to drafts; None if it lends nothing."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        return DTYPES[self.dtype]

    def check_version(self) -> None:
        """Raises MismatchError for a worker that speaks another version of the contract than this process."""
        if self.protocol_version != PROTOCOL_VERSION:
            found = f"{self.role.value} speaks {self.protocol_version}, this scheduler {PROTOCOL_VERSION}"
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
    """Behind a context of so many tokens a prompt's token counts for two, as it takes longer; None if each counts for
    one."""


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
    expected_draft: DraftSizes | None = None
    """For verify: the draft to prepare for."""
    measures_step_tokens: bool = False
    """For verify: measure how many tokens a step beside decoding may have."""
    protocol_version: int = PROTOCOL_VERSION
    is_debug: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError naming the size that is out of range."""
        for name, value, low, high in (
            ("epoch", self.epoch, 1, LARGEST_EPOCH),
            ("num_slots", self.shape.num_slots, 2, 2**16),
            ("run_ahead", self.shape.run_ahead, 0, 64),
            ("num_draft_tokens", self.shape.num_draft_tokens, 0 if self.given is None else 1, 64),
            ("chunk_tokens", self.shape.chunk_tokens, 1, 2**20),
            ("page_tokens", self.page_tokens, 1, 2**16),
            ("num_pages", self.num_pages, 2, 2**31),
            ("slot_pages", self.slot_pages, 1, 2**24),
            ("context_tokens", self.context_tokens, 2, 2**24),
        ):
            if not low <= value <= high:
                raise ConfigError(f"attach.{name}", value, f"{low} to {high}")


def slot_pages(shape: EpochShape, *, context_tokens: int, page_tokens: int) -> int:
    """Returns the length of a slot's page list: a whole context and the tokens that run-ahead may write behind it."""
    slack = (shape.run_ahead + 1) * (shape.num_draft_tokens + 1)
    return -(-(context_tokens + slack) // page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRegion:
    """The memory between verify and one draft, which verify maps beside its running steps."""

    epoch: int
    """Verify's."""
    attachment: int
    """Number of the draft's attachment."""
    own: Manifest
    """The memory that the draft writes."""
    given: Manifest
    """The memory that verify writes for it."""
    draft: DraftSizes

    def __post_init__(self) -> None:
        """Raises ConfigError for an attachment that no command could name."""
        if not 1 <= self.attachment <= LARGEST_EPOCH:
            raise ConfigError("attach_draft.attachment", self.attachment, f"1 to {LARGEST_EPOCH}")
