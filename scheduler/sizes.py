"""The sizes of a batch, and of the memory of an epoch, from the configuration and what the workers say."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import ConfigError, OutOfMemoryError
from slipstream.common.host import host_bytes
from slipstream.common.wire.step import RowTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.wire.worker import DeviceMemory, WorkerDescription
    from slipstream.scheduler.config import SchedulerConfig

LEAST_PROMPTS = 4
"""One in so many tokens of a step is for prompts, however many sequences decode."""
FEW_STEPS, LEAST_SMALL = 3, 1024
"""If FEW_STEPS small steps take in all prompts that wait, steps are small: they have half of the tokens, at least
LEAST_SMALL. With fewer a token takes longer on a GPU. If FEW_STEPS steps of the measured size do not, steps may be
large."""
MANY_GUESSES, FEW_WAITING, MOST_WITHOUT = 32, 8, 32
"""While more wait than that, steps of more than LEAST_SMALL tokens draft none if draft tokens would be one in
MANY_GUESSES of these or more, and two prompts wait at least, and more than one for FEW_WAITING sequences that decode.
First tokens are sooner then, and other tokens later. So MOST_WITHOUT steps do so at most until fewer wait: what lasts
longer is no burst, but the usual load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The limits of a batch."""

    num_slots: int
    """Row 0 included."""
    num_pages: int
    """Page 0 included."""
    page_tokens: int
    chunk_tokens: int
    """Tokens of a step that takes in prompts: those that it decodes, draft tokens included, and prompt tokens."""
    num_draft_tokens: int
    """The largest K that a draft may have."""
    run_ahead: int
    has_prefix_cache: bool = True
    shared_chunk_tokens: int | None = None
    """Token budget of a step that also decodes, measured by verify. None: same as `chunk_tokens`."""
    large_chunk_tokens: int | None = None
    """Token budget of such a step while a crowd of prompts waits. None: same as `shared_chunk_tokens`."""
    doubling_context: int | None = None
    """Context length from which a prompt token costs two tokens of such a budget, measured by verify. None: never."""
    row_tokens: RowTokens = RowTokens.WHOLE
    """How the numbers of draft tokens of a step's rows may differ, by verify's word."""
    mixes: bool = True
    """Whether a step may both decode and take in prompts; if not, they take turns."""

    @property
    def mixed_tokens(self) -> int:
        """Tokens of a step that takes in prompts while sequences decode."""
        return self.chunk_tokens if self.shared_chunk_tokens is None else self.shared_chunk_tokens

    @property
    def most_step_tokens(self) -> int:
        """The most tokens that a decode step brings a sequence."""
        return self.num_draft_tokens + 1

    @property
    def most_choices(self) -> int:
        """The most tokens that are sampled in a step."""
        return (self.num_slots - 1) * self.most_step_tokens

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step."""
        if not self.mixes:
            return max(self.chunk_tokens, self.most_choices)
        return max(self.chunk_tokens, self.most_choices + self.room_for_prompts(self.chunk_tokens))

    def room_for_prompts(self, num_decoded: int) -> int:
        """Prompt tokens in a step that decodes so many tokens: what these leave, and a part in any case.

        It may always have as many as it decodes, which hardly doubles its time, up to that part of the largest step,
        and no more for large chunks.
        """
        return self._room(self.mixed_tokens if num_decoded else self.chunk_tokens, num_decoded)

    def room_in_small_step(self, num_decoded: int) -> int:
        """The same in a small step, which those that decode wait for half as long; where there are none, all."""
        if not num_decoded or not self.mixes:
            return self.room_for_prompts(num_decoded)
        return self._room(max(self.mixed_tokens // 2, min(self.mixed_tokens, LEAST_SMALL)), num_decoded)

    def room_in_large_step(self, num_decoded: int) -> int:
        """Prompt tokens in a large step, for a crowd of prompts: first tokens are sooner, and other tokens later."""
        if not num_decoded or self.large_chunk_tokens is None:
            return self.room_for_prompts(num_decoded)
        return self._room(self.large_chunk_tokens, num_decoded)

    def skips_drafting(self, num_draft_tokens: int, num_decoding: int, num_waiting: int) -> bool:
        """Whether a step drafts none while more prompts wait than small steps take in."""
        if not self.mixes or self.mixed_tokens <= LEAST_SMALL:
            return False
        has_many = MANY_GUESSES * num_decoding * num_draft_tokens >= self.mixed_tokens
        return has_many and num_waiting > 1 + num_decoding // FEW_WAITING

    def _room(self, num_tokens: int, num_decoded: int) -> int:
        if not self.mixes:
            return num_tokens
        largest = min(self.chunk_tokens, max(self.mixed_tokens, GPU_STEP_TOKENS))
        part, most_part = -(-num_tokens // LEAST_PROMPTS), -(-largest // LEAST_PROMPTS)
        return max(num_tokens - num_decoded, part, min(num_decoded, most_part))

    def pages_for(self, num_tokens: int) -> int:
        """Pages for so many tokens, prompt and output, with those that run-ahead may add."""
        return self.pages_of(num_tokens + (self.run_ahead + 1) * self.most_step_tokens)

    def context_of(self, num_pages: int) -> int:
        """The most tokens, prompt and output, for which `pages_for` says no more than so many pages."""
        return num_pages * self.page_tokens - (self.run_ahead + 1) * self.most_step_tokens

    def pages_of(self, num_tokens: int) -> int:
        """Pages for so many tokens and no more."""
        return -(-num_tokens // self.page_tokens)


class BatchCounts(NamedTuple):
    """Counts of a batch's events since it was made; they only grow."""

    not_finite: int = 0
    """Sequences that ended because the model's logits were NaN or infinite."""
    preemptions: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that the prefix cache had."""


MIB = 2**20
HOST_KV_MIB = 512
"""Memory for KV pages on a CPU, if kv_memory_mib is not set."""
HOST_STEP_TOKENS = 512
"""Tokens of the largest step of prompts, if max_batched_tokens is auto: on a CPU, and on a GPU with no room for more.
Buffers and memory are for such a step. While sequences decode, verify's measurement holds (`Attachment`)."""
GPU_STEP_TOKENS = 2048
"""The same on a GPU: about as many as keep it busy."""
LARGE_STEP_TOKENS, LARGE_STEP_PAGES = 8192, 0.95
"""Most tokens of a step on a GPU with memory for them, where this part of the KV pages remains: fewer steps take in a
crowd's prompts. Not where all steps have one size, to which each is padded."""
LARGE_PAUSES = 2
"""Tokens of a large step, as a multiple of those that keep the pause of sequences that decode."""
MOST_DRAFT_PART = 4
"""Memory is planned without a draft beside which there are fewer KV pages than a part of this many of them."""
_LESS = "Less is needed with a smaller context_tokens, slots, max_batched_tokens or kv_memory_mib"
HOST_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 64
"""Tokens of a page, if page_tokens is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The descriptions of the workers that an epoch's sizes are decided for."""

    verify: WorkerDescription
    draft: WorkerDescription | None
    """The draft that is expected: it may arrive and leave."""
    num_draft_tokens: int | None = None
    """K of that draft, as `DraftTarget` has it; 0: no draft is wanted for now."""

    @property
    def all(self) -> list[WorkerDescription]:
        """The workers that there are."""
        return [self.verify] if self.draft is None else [self.verify, self.draft]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSizes:
    """The sizes that the scheduler decides when it knows the workers."""

    batch: BatchSizes
    context_tokens: int

    @classmethod
    def decide(cls, config: SchedulerConfig, workers: Workers) -> EpochSizes:
        """Takes as many pages as fit the memory, at most as many as the slots can use.

        Raises ConfigError if one request does not fit `kv_memory_mib`, OutOfMemoryError if it does not fit the device.
        """
        if config.max_batched_tokens is None and workers.verify.memory.total:
            with suppress(OutOfMemoryError):  # smaller steps take less
                sizes = cls._decide(config, workers, GPU_STEP_TOKENS)
                return sizes if workers.verify.row_tokens is RowTokens.WHOLE else sizes._enlarged(config, workers)
        return cls._decide(config, workers, config.max_batched_tokens or HOST_STEP_TOKENS)

    def _enlarged(self, config: SchedulerConfig, workers: Workers) -> EpochSizes:
        """The sizes with large steps; these sizes where they would take too many pages."""
        with suppress(OutOfMemoryError):
            large = self._decide(config, workers, LARGE_STEP_TOKENS)
            if large.batch.num_pages >= LARGE_STEP_PAGES * self.batch.num_pages:
                return large
        return self

    def check_share(self, without: EpochSizes) -> None:
        """Raises OutOfMemoryError if a draft, by its own word, leaves too few of the pages that it finds."""
        if self.batch.num_pages * MOST_DRAFT_PART < without.batch.num_pages:
            raise OutOfMemoryError(
                f"it would leave {self.batch.num_pages} of {without.batch.num_pages} KV pages, "
                f"accepted: one of {MOST_DRAFT_PART} or more"
            )

    @classmethod
    def _decide(cls, config: SchedulerConfig, workers: Workers, chunk_tokens: int) -> EpochSizes:
        # A draft's own context limits what it drafts for, and nothing else.
        longest = workers.verify.max_context_tokens
        context = longest if config.context_tokens is None else config.context_tokens
        if context > longest:
            raise ConfigError("context_tokens", context, f"at most {longest}, what the model was made for")
        page_tokens = config.page_tokens or (GPU_PAGE_TOKENS if workers.verify.memory.total else HOST_PAGE_TOKENS)
        sizes = BatchSizes(
            num_slots=config.slots + 1,
            num_pages=0,
            page_tokens=page_tokens,
            chunk_tokens=min(chunk_tokens, context),
            num_draft_tokens=config.draft_tokens(workers.verify.row_tokens),
            run_ahead=config.run_ahead,
            has_prefix_cache=not config.no_prefix_cache,
            row_tokens=workers.verify.row_tokens,
            mixes=workers.verify.takes_mixed_steps,
        )
        needed = sizes.pages_for(context) + 1
        choices = sizes.most_choices
        plan = MemoryPlan(
            workers.all,
            page_bytes=page_tokens * max(1, sum(worker.kv_bytes_per_token for worker in workers.all)),
            step_tokens=sizes.most_tokens,
            step_choices=choices,
            reserve_bytes=config.memory_reserve_mib * MIB,
        )
        request = f"one request with {context} tokens of context"
        kv_mib = HOST_KV_MIB if config.kv_memory_mib is None and plan.is_on_host else config.kv_memory_mib
        if kv_mib is None:
            num_pages = plan.pages_that_fit(at_least=needed, of=request)
        else:
            num_pages = kv_mib * MIB // plan.page_bytes
            if num_pages < needed:
                accepted = f"at least {plan.mib(needed)}, the KV of {request}"
                if (most := sizes.context_of(num_pages - 1)) > 1:
                    accepted += f", or context_tokens of at most {most}"
                raise ConfigError("kv_memory_mib", kv_mib, accepted)
        useful = min(num_pages, config.slots * (needed - 1) + 1)
        plan.check(useful)
        return cls(batch=replace(sizes, num_pages=useful), context_tokens=context)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one epoch, planned when both workers have loaded their weights."""

    workers: Sequence[WorkerDescription]
    page_bytes: int
    """KV bytes of a page, both workers together."""
    step_tokens: int
    """Tokens of the largest step."""
    step_choices: int
    """Tokens sampled in the largest step."""
    reserve_bytes: int
    """Memory left free if kv_memory_mib is not set."""

    @property
    def is_on_host(self) -> bool:
        """True if the workers compute in the host's memory, which is not counted."""
        return not self.workers[0].memory.total

    @property
    def free(self) -> int:
        """Free bytes, as the first worker reported: verify, or a draft that arrives beside it."""
        return self.workers[0].memory.free

    @property
    def work(self) -> int:
        """Bytes that the workers will take beside KV pages."""
        return sum(_work(worker.memory, self.step_tokens, self.step_choices) for worker in self.workers)

    @property
    def shared(self) -> int:
        """Bytes of verify's weights that a draft reads, too, in place of copies of its own."""
        return sum(worker.shared_weight_bytes for worker in self.workers)

    def pages_that_fit(self, *, at_least: int, of: str) -> int:
        """Pages that fit a GPU. Raises OutOfMemoryError if they are fewer than `at_least`, the KV of `of`."""
        num_pages = (self.free - self.work - self.reserve_bytes) // self.page_bytes
        if num_pages < at_least:
            raise self._too_little(at_least, of, self.reserve_bytes)
        return int(num_pages)

    def check(self, num_pages: int) -> None:
        """Raises OutOfMemoryError if so many pages do not fit beside everything else."""
        if self.is_on_host:
            # The host gives away more memory than it has, and ends a process that then uses it.
            if num_pages * self.page_bytes > (there := host_bytes()):
                raise OutOfMemoryError(
                    f"host memory: {self.mib(num_pages)} MiB are needed for {num_pages} KV pages, and the host has "
                    f"{there // MIB} MiB. {_LESS}"
                )
        elif self.work + num_pages * self.page_bytes > self.free:
            raise self._too_little(num_pages, f"{num_pages} pages", 0)

    def mib(self, num_pages: int) -> int:
        """MiB of so many pages, rounded up."""
        return -(-num_pages * self.page_bytes // MIB)

    def _too_little(self, num_pages: int, of: str, reserve: int) -> OutOfMemoryError:
        needed = num_pages * self.page_bytes + self.work + reserve
        weights = " and ".join(
            f"{worker.memory.weights / MIB:.0f} MiB ({worker.role.value})" for worker in self.workers
        )
        shared = f", and {self.shared / MIB:.0f} MiB more without --share-weights" if self.shared else ""
        return OutOfMemoryError(
            f"GPU memory: {needed / MIB:.0f} MiB are needed and {self.free / MIB:.0f} MiB of "
            f"{self.workers[0].memory.total / MIB:.0f} MiB are free: KV pages {self.mib(num_pages)} MiB ({of}), "
            f"graphs and steps {self.work / MIB:.0f} MiB, reserve {reserve / MIB:.0f} MiB; weights have taken "
            f"{weights}{shared}. {_LESS}"
        )


def check_draft_memory(draft: WorkerDescription, sizes: EpochSizes) -> None:
    """Raises OutOfMemoryError if a draft that arrives while an epoch is open does not fit beside it."""
    batch = sizes.batch
    choices = batch.most_choices
    page_bytes = batch.page_tokens * draft.kv_bytes_per_token
    if page_bytes:
        plan = MemoryPlan([draft], page_bytes, batch.most_tokens, choices, reserve_bytes=0)
        try:
            plan.check(batch.num_pages)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{error}, or start the server with this draft, which is then planned for, or with a larger "
                "memory_reserve_mib"
            ) from None


def leading_bits(number: int, num_bits: int) -> int:
    """Returns the number with only its first bits: one for all numbers of about the same size."""
    places = max(0, number.bit_length() - num_bits)
    return number >> places << places


def _work(memory: DeviceMemory, num_tokens: int, num_choices: int) -> int:
    return memory.work + memory.work_per_token * num_tokens + memory.work_per_choice * num_choices
