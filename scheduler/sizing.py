"""The sizes of an epoch, decided when the scheduler knows its workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError, MismatchError
from slipstream.scheduler.batch import BatchSizes

if TYPE_CHECKING:
    from slipstream.common.worker_contract import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What the workers said of themselves."""

    verify: WorkerDescription
    draft: WorkerDescription | None

    @property
    def algorithm(self) -> str:
        """How tokens are drafted; "none" when nothing drafts."""
        return "none" if self.draft is None else self.draft.algorithm

    @property
    def hidden_width(self) -> int:
        """Width of the hidden states that the draft reads. Raises MismatchError if verify has others."""
        if self.draft is None or not self.draft.hidden_width:
            return 0
        if self.draft.hidden_width != self.verify.hidden_width:
            widths = f"draft reads {self.draft.hidden_width}, verify writes {self.verify.hidden_width}"
            raise MismatchError([f"width of the hidden states: {widths}"])
        return self.draft.hidden_width


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSizes:
    """The sizes that the scheduler decides when it knows the workers."""

    batch: BatchSizes
    context_tokens: int

    @classmethod
    def decide(cls, config: SchedulerConfig, workers: Workers) -> EpochSizes:
        """As many pages as the memory and the slots have use for. Raises ConfigError if one request does not fit."""
        both = [workers.verify] if workers.draft is None else [workers.verify, workers.draft]
        longest = min(worker.max_context_tokens for worker in both)
        context = longest if config.context_tokens is None else config.context_tokens
        if context > longest:
            raise ConfigError("context_tokens", context, f"at most {longest}, what the models were made for")
        page_bytes = config.page_tokens * max(1, sum(worker.kv_bytes_per_token for worker in both))
        sizes = BatchSizes(
            num_slots=config.slots + 1,
            num_pages=config.kv_memory_mib * MIB // page_bytes,
            page_tokens=config.page_tokens,
            chunk_tokens=min(config.chunk_tokens, context),
            num_draft_tokens=0 if workers.draft is None else config.num_draft_tokens,
            run_ahead=config.run_ahead,
        )
        needed = sizes.pages_for(context)
        if sizes.num_pages <= needed:
            least_mib = -(-(needed + 1) * page_bytes // MIB)
            accepted = f"at least {least_mib}, the KV of one request with {context} tokens of context"
            raise ConfigError("kv_memory_mib", config.kv_memory_mib, accepted)
        useful = min(sizes.num_pages, config.slots * needed + 1)
        return cls(batch=replace(sizes, num_pages=useful), context_tokens=context)
