"""The sizes of an epoch, decided when the scheduler knows its workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError, MismatchError
from slipstream.scheduler.core.batch import BatchSizes
from slipstream.scheduler.workers.memory_plan import MIB, MemoryPlan

if TYPE_CHECKING:
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What the workers said of themselves."""

    verify: WorkerDescription
    draft: WorkerDescription | None

    @property
    def all(self) -> list[WorkerDescription]:
        """Those that are there."""
        return [self.verify] if self.draft is None else [self.verify, self.draft]

    @property
    def under_mps(self) -> bool:
        """Whether all of them share the GPU under MPS."""
        return all(worker.under_mps for worker in self.all)

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
        """As many pages as the memory and the slots have use for.

        Raises ConfigError if one request does not fit `kv_memory_mib`, OutOfMemoryError if it does not fit the GPU.
        """
        longest = min(worker.max_context_tokens for worker in workers.all)
        context = longest if config.context_tokens is None else config.context_tokens
        if context > longest:
            raise ConfigError("context_tokens", context, f"at most {longest}, what the models were made for")
        sizes = BatchSizes(
            num_slots=config.slots + 1,
            num_pages=0,
            page_tokens=config.page_tokens,
            chunk_tokens=min(config.chunk_tokens, context),
            num_draft_tokens=0 if workers.draft is None else config.num_draft_tokens,
            run_ahead=config.run_ahead,
        )
        needed = sizes.pages_for(context) + 1
        choices = config.slots * (sizes.num_draft_tokens + 1)
        plan = MemoryPlan(
            workers.all,
            page_bytes=config.page_tokens * max(1, sum(worker.kv_bytes_per_token for worker in workers.all)),
            step_tokens=max(sizes.chunk_tokens, choices),
            step_choices=choices,
            reserve_bytes=config.memory_reserve_mib * MIB,
        )
        if config.kv_memory_mib is None:
            num_pages = plan.pages_that_fit(at_least=needed, of=f"one request with {context} tokens of context")
        else:
            num_pages = config.kv_memory_mib * MIB // plan.page_bytes
            if num_pages < needed:
                accepted = f"at least {plan.mib(needed)}, the KV of one request with {context} tokens of context"
                raise ConfigError("kv_memory_mib", config.kv_memory_mib, accepted)
        useful = min(num_pages, config.slots * (needed - 1) + 1)
        plan.check(useful)
        return cls(batch=replace(sizes, num_pages=useful), context_tokens=context)
