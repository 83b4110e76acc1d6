"""A worker's state of each slot: pages, limit, sampling. Private to the worker, written in stream order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.worker.step import StepKind
from slipstream.services.models.adjustments import AdjustmentRows, TokenHistory
from slipstream.services.models.sampler import SamplingRows
from slipstream.services.worker.staging import put_integers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.api.sequence import SamplingParams
    from slipstream.common.worker.contract import Attachment
    from slipstream.common.worker.step import SlotUpdate, StepCommand
    from slipstream.services.worker.staging import Staging


class SamplingMode(enum.Enum):
    """The work that sampling a batch takes; each mode includes those above it."""

    NOISE = enum.auto()
    """Greedy requests, and others with noise."""
    FILTERS = enum.auto()
    """Requests with top-k, top-p or min-p."""
    ADJUSTMENTS = enum.auto()
    """Requests that change the logits before: bias, penalties, a mask."""


class SlotTable:
    """Rows are slots; row 0 is padding and has only the padding page."""

    def __init__(
        self, attachment: Attachment, vocab_size: int, device: torch.device, *, longest: int | None = None
    ) -> None:
        """`vocab_size`: token ids of updates are below it. `longest`: tokens that the model takes; limits end there."""
        slots = attachment.shape.num_slots
        self._num_slots = slots
        self._num_pages = attachment.num_pages
        self._num_draft_tokens = attachment.shape.num_draft_tokens
        self._chunk_tokens = attachment.shape.chunk_tokens
        self._max_pages = attachment.slot_pages
        self._max_limit = attachment.context_tokens
        self._longest = attachment.context_tokens if longest is None else longest
        self.vocab_size = vocab_size
        """Token ids are below it: the target's, for a draft, too."""
        self.page_table = torch.zeros((slots, self._max_pages), dtype=torch.int64, device=device)
        """[slots, pages] int64 page numbers; 0 where a slot has none."""
        # Written in one operation: each costs the host several times what it costs the device.
        self._bounds = torch.zeros((3, slots), dtype=torch.int64, device=device)
        self._starts = torch.zeros((2, slots), dtype=torch.int64, device=device)
        self.limits, self.prompt_tokens, self.max_draft_tokens = self._bounds.unbind()
        """[slots] int64 each: positions from here on have no KV; tokens of chunks at positions from here on are output;
        0 to K, draft tokens that are accepted in a step at most."""
        self.history_from, self.written_from = self._starts.unbind()
        """[slots] int64 each: positions before it have no keys and values in a draft that attached late; a head's
        prefill writes nothing before it, which the prefix cache has or attention masks."""
        self.max_draft_tokens.fill_(self._num_draft_tokens)
        self.have_cache_salt = torch.zeros(slots, dtype=torch.bool, device=device)
        """[slots] bool: nothing of the slot's request serves another one, nor anything of another one it."""
        self.sampling = SamplingRows.greedy(slots, device=device)
        """One row a slot."""
        self.adjustments = AdjustmentRows.off(slots, device=device)
        """One row a slot."""
        self.history = TokenHistory(slots, vocab_size, device)
        """One row a slot; kept up to date while `has_penalties`."""
        self.adjusts_logits = False
        """Stream work: True if the last request of any slot has logit bias, penalties or a mask."""
        self.has_penalties = False
        """Stream work: True if the last request of any slot has penalties."""
        self.has_late_history = False
        """Stream work: True if the last request of any slot has a `history_from` above 0."""
        self._params: dict[int, SamplingParams] = {}
        self._adjusted: set[int] = set()
        self._late: set[int] = set()

    def check(self, command: StepCommand) -> None:
        """Raises InvalidArgumentError for slots, pages and tokens out of range, before anything is enqueued."""
        for slot in command.slots:
            _check("slots", slot, 1, self._num_slots - 1)
        if len(set(command.slots)) < len(command.slots):
            raise InvalidArgumentError("slots", command.slots, "each slot once")
        for update in command.updates:
            self._check_update(update)
        self._check_chunks(command)

    def sampling_mode(self, slots: Sequence[int]) -> SamplingMode:
        """Stream work: the mode of a batch of these slots."""
        if self._params.keys().isdisjoint(slots):
            return SamplingMode.NOISE
        params = [self._params[slot] for slot in slots if slot in self._params]
        return SamplingMode.ADJUSTMENTS if any(row.adjusts_logits for row in params) else SamplingMode.FILTERS

    def changes(self, updates: Sequence[SlotUpdate], staging: Staging) -> SlotChanges:
        """Stages updates for `take_over`. Call in the order of commands: the result depends on earlier updates."""
        places: list[int] = []
        for update in updates:
            first = update.slot * self._max_pages + update.first_page_index
            places += range(first, first + len(update.pages))
        params = {update.slot: update.sampling for update in updates if update.sampling is not None}
        history_from = {update.slot: update.history_from for update in updates if update.sampling is not None}
        cached_tokens = {update.slot: update.cached_tokens for update in updates if update.sampling is not None}
        written_from = {slot: max(start, cached_tokens[slot]) for slot, start in history_from.items()}
        salts = {update.slot: update.has_cache_salt for update in updates if update.sampling is not None}
        rows = list(params.values())
        has_adjustments = not self._adjusted.isdisjoint(params) or any(row.adjusts_logits for row in rows)
        bounds = [min(update.limit_tokens, self._longest) for update in updates]
        bounds += [self._end_of_prompt(update.prompt_tokens) for update in updates]
        bounds += [self._clamped(update.max_draft_tokens) for update in updates]
        parts = (
            [update.slot for update in updates],
            bounds,
            [update.slot for update in updates if update.first_page_index == 0],
            places,
            [page for update in updates for page in update.pages],
            list(params),
            [*history_from.values(), *written_from.values()],
        )
        staged = torch.split(put_integers(staging, [*chain.from_iterable(parts)]), [len(part) for part in parts])
        slots, staged_bounds, emptied, staged_places, pages, taken, starts = staged
        return SlotChanges(
            slots=slots,
            bounds=staged_bounds.view(3, len(updates)),
            emptied=emptied,
            places=staged_places,
            pages=pages,
            params=params,
            late={slot for slot, position in history_from.items() if position},
            taken=taken,
            starts=starts.view(2, len(params)),
            have_cache_salt=staging.put(torch.tensor(list(salts.values()))) if params else None,
            sampling=SamplingRows.of(rows).map(staging.put) if params else None,
            adjustments=AdjustmentRows.of(rows).map(staging.put) if has_adjustments else None,
        )

    def take_over(self, changes: SlotChanges) -> None:
        """Stream work: writes staged changes."""
        if len(changes.emptied):
            self.page_table.index_fill_(0, changes.emptied, 0)
        self.page_table.view(-1).index_copy_(0, changes.places, changes.pages)
        self._bounds.index_copy_(1, changes.slots, changes.bounds)
        if changes.sampling is None:
            return
        assert changes.have_cache_salt is not None, "it comes with what is taken"
        self.sampling.put(changes.taken, changes.sampling)
        self._starts.index_copy_(1, changes.taken, changes.starts)
        self.have_cache_salt.index_copy_(0, changes.taken, changes.have_cache_salt)
        self._late = self._late.difference(changes.params) | changes.late
        self.has_late_history = bool(self._late)
        others = {slot: params for slot, params in self._params.items() if slot not in changes.params}
        self._params = others | {slot: params for slot, params in changes.params.items() if not params.is_plain}
        if changes.adjustments is None:
            return
        self.adjustments.put(changes.taken, changes.adjustments)
        self.history.clear(changes.taken)
        self._adjusted = {slot for slot, params in self._params.items() if params.adjusts_logits}
        self.adjusts_logits = bool(self._adjusted)
        self.has_penalties = any(self._params[slot].has_penalty for slot in self._adjusted)

    def _clamped(self, max_draft_tokens: int | None) -> int:
        return self._num_draft_tokens if max_draft_tokens is None else min(self._num_draft_tokens, max_draft_tokens)

    def _end_of_prompt(self, prompt_tokens: int | None) -> int:
        return self._max_limit if prompt_tokens is None else prompt_tokens

    def _check_chunks(self, command: StepCommand) -> None:
        slots = tuple(chunk.slot for chunk in command.chunks)
        if command.is_mixed:
            for slot in slots:
                _check("chunks.slot", slot, 1, self._num_slots - 1)
            if len({*slots, *command.slots}) < len(slots) + len(command.slots):
                raise InvalidArgumentError("chunks", slots, "each slot once, and none of those that decode")
        elif slots != (command.slots if command.kind in (StepKind.PREFILL, StepKind.CATCH_UP) else ()):
            accepted = "one for each of slots, in their order, in a PREFILL or CATCH_UP"
            raise InvalidArgumentError("chunks", slots, accepted)
        for chunk in command.chunks:
            if not chunk.tokens:
                raise InvalidArgumentError("chunks.tokens", chunk.tokens, "at least one token")
            _check("chunks.start", chunk.start, 0, self._max_limit - len(chunk.tokens))
            _check("chunks.tokens", max(chunk.tokens), 0, self.vocab_size - 1)
        _check("chunks.tokens", sum(len(chunk.tokens) for chunk in command.chunks), 0, self._chunk_tokens)

    def _check_update(self, update: SlotUpdate) -> None:
        _check("updates.slot", update.slot, 1, self._num_slots - 1)
        _check("updates.first_page_index", update.first_page_index, 0, self._max_pages - len(update.pages))
        _check("updates.limit_tokens", update.limit_tokens, 0, self._max_limit)
        _check("updates.history_from", update.history_from, 0, self._max_limit)
        _check("updates.cached_tokens", update.cached_tokens, 0, self._max_limit)
        _check("updates.prompt_tokens", self._end_of_prompt(update.prompt_tokens), 0, self._max_limit)
        for page in update.pages:
            _check("updates.pages", page, 1, self._num_pages - 1)
        if update.sampling is not None:
            update.sampling.check_token_ids(self.vocab_size)


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgumentError(field, value, f"{low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanges:
    """Changes of U slots before a step: made on the host, staged. All tensors are on the device."""

    slots: torch.Tensor
    """[U] int64."""
    bounds: torch.Tensor
    """[3, U] int64: limits, prompt tokens, draft tokens at most."""
    emptied: torch.Tensor
    """[E] int64: slots whose page lists begin anew."""
    places: torch.Tensor
    """[P] int64: where in the page table, row after row, `pages` go."""
    pages: torch.Tensor
    """[P] int64."""
    params: dict[int, SamplingParams]
    """By slot, on the host: the sampling of the requests that take over slots, T of them."""
    late: set[int]
    """Their slots that have a `history_from` above 0."""
    taken: torch.Tensor
    """[T] int64: their slots."""
    starts: torch.Tensor
    """[2, T] int64: `history_from` and `written_from`."""
    have_cache_salt: torch.Tensor | None
    """[T] bool; None where T is 0."""
    sampling: SamplingRows | None
    """None where T is 0."""
    adjustments: AdjustmentRows | None
    """None if neither these requests nor the ones before them have any."""
