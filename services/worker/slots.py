"""A worker's state of each slot: pages, limit, sampling. Private to the worker, written in stream order."""

from __future__ import annotations

import enum
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.layout import PADDING_SLOT
from slipstream.services.models.adjustments import AdjustmentRows, TokenHistory
from slipstream.services.models.attention import RaggedRows
from slipstream.services.models.sampler import SamplingRows
from slipstream.services.worker.future_map import NO_REGION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from slipstream.common.wire.sequence import SamplingParams
    from slipstream.common.wire.step import PrefillChunk, RowTokens, SlotUpdate, StepCommand
    from slipstream.common.wire.worker import Attachment

_ALIGNMENT_BYTES = 16


class Staging:
    """Brings the contents of a command to the device: packed into pinned memory, fetched at once, without waiting.

    A step puts each piece of its command (pages, limits, sampling, prompts) as a host tensor or integers, for which it
    gets a device tensor, and flushes: one kernel on the worker's stream fetches it all. Belongs to the thread that
    enqueues. Call `begin`, then `put…` many times, then `flush` as stream work.

    This one is for a device that is the host, where values stay where they are; `PinnedStaging` is for all others.
    """

    def begin(self, step: int, slots: Sequence[int], region_words: Sequence[int] = NO_REGION) -> None:
        """Begins a step: its number, its slots, and the `Region.words` of the draft that takes part."""

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Stages values (on the host, contiguous); returns their place in the step's work, good for that step only."""
        return values

    def put_integers(self, values: Sequence[int]) -> torch.Tensor:
        """Stages integers as int64; see `put`."""
        return torch.tensor(values, dtype=torch.int64)

    def flush(self) -> None:
        """Stream work: brings the staged values to the device."""


class PinnedStaging(Staging):
    """A `Staging` for a device with memory of its own.

    On the device there is one buffer, used again in stream order; on the host a ring of buffers, each used again when
    its contents are fetched. What `begin` is given is always at the same place, so that graphs can read it.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_bytes: int,
        depth: int,
        device: torch.device,
        fetch: Callable[[torch.Tensor, torch.Tensor], None],
        blocked: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`num_bytes`: of all values in a step; more takes copies of their own. `depth`: host buffers, and rows of
        the FutureMap's ring.

        `fetch` copies the second tensor, on the host, to the first, on the device, in words of 64 bits.
        `blocked` is entered with the step, for as long as the thread waits for the device.
        """
        self._fetch = fetch
        self._blocked = blocked
        fixed = _aligned((1 + len(NO_REGION) + num_slots) * 8)
        size = fixed + _aligned(num_bytes)
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(depth)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        # Views made once, so that a step only writes.
        self._bytes = [buffer.numpy() for buffer in self._host]
        self._words = [buffer.view(torch.int64).numpy() for buffer in self._host]
        self._device_words = self._device.view(torch.int64)
        self._heads = [words[: fixed // 8] for words in self._words]
        self._fixed = [(self._device[:fixed], buffer[:fixed]) for buffer in self._host]
        self._copied = _events(device, depth)
        self._spilled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._first_free = fixed
        self._used = fixed
        self._turn = 0
        first_slot = 1 + len(NO_REGION)
        self.ring_row = self._device_words[:1]
        """[1] int64 on the device: the step's row of the FutureMap's ring."""
        self.region_words = self._device_words[1:first_slot]
        """[words of `RegionWord`] int64 on the device."""
        self.slots = self._device_words[first_slot : first_slot + num_slots]
        """[num_slots] int64 on the device: the step's slots, then padding."""

    def begin(self, step: int, slots: Sequence[int], region_words: Sequence[int] = NO_REGION) -> None:
        """See `Staging.begin`. Blocks only if the device is late by a whole ring of steps."""
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied and not self._copied[self._turn].query():  # type: ignore[no-untyped-call]
            with self._blocked(step):
                self._copied[self._turn].synchronize()
        head, values = self._heads[self._turn], (step % len(self._host), *region_words, *slots)
        head[: len(values)] = values
        head[len(values) :] = PADDING_SLOT
        self._used = self._first_free
        self._spilled.clear()

    def put(self, values: torch.Tensor) -> torch.Tensor:
        assert values.is_contiguous(), "a host tensor is packed as it lies in memory"
        end = self._used + values.nbytes
        if end > len(self._device):
            return self._spill(values)
        place = self._device[self._used : end].view(values.dtype).view(values.shape)
        self._bytes[self._turn][self._used : end] = values.view(-1).view(torch.uint8).numpy()
        self._used = _aligned(end)
        return place

    def put_integers(self, values: Sequence[int]) -> torch.Tensor:
        """See `Staging.put_integers`. Hardly uses PyTorch: between two steps the host's caches forget its code."""
        begin = self._used // 8
        end = begin + len(values)
        if end > len(self._device_words):
            return self._spill(torch.tensor(values, dtype=torch.int64))
        self._words[self._turn][begin:end] = values
        self._used = _aligned(8 * end)
        return self._device_words[begin:end]

    def flush(self) -> None:
        if self._used == self._first_free:
            self._fetch(*self._fixed[self._turn])
        else:
            self._fetch(self._device[: self._used], self._host[self._turn][: self._used])
        for source, target in self._spilled:
            target.copy_(source, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()

    def _spill(self, values: torch.Tensor) -> torch.Tensor:
        source = values.pin_memory() if self._device.is_cuda else values
        target = torch.empty_like(values, device=self._device.device)
        self._spilled.append((source, target))
        return target


def _events(device: torch.device, count: int) -> list[torch.cuda.Event]:
    """An event for each host buffer, which tells when it is fetched; none where there are no streams."""
    return [torch.cuda.Event(blocking=True) for _ in range(count)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]


def staged_bytes(attachment: Attachment) -> int:
    """Bytes that a step's command takes at most."""
    shape, page_bytes, row_bytes = attachment.shape, 16, 8192
    token_bytes = 3 * 8
    return attachment.num_pages * page_bytes + shape.num_slots * row_bytes + shape.chunk_tokens * token_bytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class FlatChunks:
    """B chunks of prompts, one after the other for one forward: N tokens. All tensors are on the device."""

    slots: torch.Tensor
    """[B] int64."""
    tokens: torch.Tensor
    """[N] int64."""
    positions: torch.Tensor
    """[N] int64."""
    ragged: RaggedRows
    """The chunks as rows."""

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], staging: Staging) -> FlatChunks:
        """Lays them out on the host."""
        lengths = tuple(len(chunk.tokens) for chunk in chunks)
        num_keys = tuple(chunk.start + len(chunk.tokens) for chunk in chunks)
        counts, starts = torch.tensor(lengths), torch.tensor([chunk.start for chunk in chunks])
        begins = torch.zeros(len(chunks) + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=begins[1:])
        rows = torch.repeat_interleave(counts)
        positions = torch.arange(len(rows)) + (starts - begins[:-1])[rows]
        return cls(
            slots=staging.put_integers([chunk.slot for chunk in chunks]),
            tokens=staging.put_integers([token for chunk in chunks for token in chunk.tokens]),
            positions=staging.put(positions),
            ragged=RaggedRows(lengths, staging.put(rows), staging.put(begins), num_keys),
        )


_COLUMNS = _LIMIT, _PROMPT_TOKENS, _MAX_DRAFT_TOKENS, _HISTORY_FROM, _WRITTEN_FROM = range(5)
"""Words of a slot, by their place."""


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
        self._first_column = slots * self._max_pages
        # In one piece, so that one operation writes all of an update: each costs the host much more than the device.
        self._words = torch.zeros(self._first_column + len(_COLUMNS) * slots, dtype=torch.int64, device=device)
        columns = self._words[self._first_column :].view(len(_COLUMNS), slots).unbind()
        self.page_table = self._words[: self._first_column].view(slots, self._max_pages)
        """[slots, pages] int64 page numbers; 0 where a slot has none."""
        self.limits = columns[_LIMIT]
        """[slots] int64: positions from here on have no KV."""
        self.prompt_tokens = columns[_PROMPT_TOKENS]
        """[slots] int64: tokens of chunks at positions from here on are output."""
        self.max_draft_tokens = columns[_MAX_DRAFT_TOKENS].fill_(self._num_draft_tokens)
        """[slots] int64, 0 to K: draft tokens that are accepted in a step at most."""
        self.history_from = columns[_HISTORY_FROM]
        """[slots] int64: positions before it have no keys and values in a draft that attached late."""
        self.written_from = columns[_WRITTEN_FROM]
        """[slots] int64: a head's prefill writes nothing before it, which the prefix cache has or attention masks."""
        self.have_cache_salt = torch.zeros(slots, dtype=torch.bool, device=device)
        """[slots] bool: nothing of the slot's request serves another one, nor anything of another one it."""
        self.sampling = SamplingRows.greedy(slots, device=device)
        """One row a slot."""
        self.adjustments = AdjustmentRows.off(slots, device=device)
        """One row a slot."""
        self.history = TokenHistory(slots, vocab_size, device)
        """One row a slot; kept up to date while `has_penalties`."""
        self.has_penalties = False
        """Stream work: True if the last request of any slot has penalties."""
        self.has_late_history = False
        """Stream work: True if the last request of any slot has a `history_from` above 0."""
        self._params: dict[int, SamplingParams] = {}
        self._staged_adjusted: set[int] = set()
        """The slots whose last request, as far as it is staged, has adjustments: the stream may not be there yet."""
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
        words: dict[int, int] = {}
        slots: set[int] = set()
        for update in updates:
            first = update.slot * self._max_pages + update.first_page_index
            if update.first_page_index == 0 and update.slot in slots:  # nothing stays of the pages before
                for place in range(first, first + self._max_pages):
                    words.pop(place, None)
            slots.add(update.slot)
            words.update(enumerate(update.pages, first))
            words.update(self._columns_of(update))
        last = {update.slot: update for update in updates if update.sampling is not None}
        params = {slot: update.sampling for slot, update in last.items() if update.sampling is not None}
        emptied = [update.slot for update in updates if update.first_page_index == 0]
        rows = list(params.values())
        has_adjustments = not self._staged_adjusted.isdisjoint(params) or any(row.adjusts_logits for row in rows)
        self._staged_adjusted.difference_update(params)
        self._staged_adjusted.update(slot for slot, row in params.items() if row.adjusts_logits)
        num_words, num_emptied = len(words), len(emptied)
        staged = staging.put_integers([*words, *words.values(), *emptied, *params])
        return SlotChanges(
            places=staged[:num_words],
            words=staged[num_words : 2 * num_words],
            emptied=staged[2 * num_words : 2 * num_words + num_emptied] if emptied else None,
            params=params,
            late={slot for slot, update in last.items() if update.history_from},
            taken=staged[2 * num_words + num_emptied :] if params else None,
            have_cache_salt=staging.put(torch.tensor([update.has_cache_salt for update in last.values()]))
            if last
            else None,
            sampling=SamplingRows.of(rows).map(staging.put) if params else None,
            adjustments=AdjustmentRows.of(rows).map(staging.put) if has_adjustments else None,
        )

    def take_over(self, changes: SlotChanges) -> None:
        """Stream work: writes staged changes."""
        if changes.emptied is not None:
            self.page_table.index_fill_(0, changes.emptied, 0)
        self._words.index_copy_(0, changes.places, changes.words)
        if changes.taken is None or changes.sampling is None:
            return
        assert changes.have_cache_salt is not None, "it is set with what is taken"
        self.sampling.put(changes.taken, changes.sampling)
        self.have_cache_salt.index_copy_(0, changes.taken, changes.have_cache_salt)
        self._late = self._late.difference(changes.params) | changes.late
        self.has_late_history = bool(self._late)
        others = {slot: params for slot, params in self._params.items() if slot not in changes.params}
        self._params = others | {slot: params for slot, params in changes.params.items() if not params.is_plain}
        if changes.adjustments is None:
            return
        self.adjustments.put(changes.taken, changes.adjustments)
        self.history.clear(changes.taken)
        self.has_penalties = any(params.has_penalty for params in self._params.values())

    def _columns_of(self, update: SlotUpdate) -> Iterator[tuple[int, int]]:
        """Yields the place of each word of a slot that an update changes, but for its pages, and the word."""
        words = {
            _LIMIT: min(update.limit_tokens, self._longest),
            _PROMPT_TOKENS: self._end_of_prompt(update.prompt_tokens),
            _MAX_DRAFT_TOKENS: self._clamped(update.max_draft_tokens),
        }
        if update.sampling is not None:
            words[_HISTORY_FROM] = update.history_from
            words[_WRITTEN_FROM] = max(update.history_from, update.cached_tokens)
        for column, word in words.items():
            yield self._first_column + column * self._num_slots + update.slot, word

    def _clamped(self, max_draft_tokens: int | None) -> int:
        return self._num_draft_tokens if max_draft_tokens is None else min(self._num_draft_tokens, max_draft_tokens)

    def _end_of_prompt(self, prompt_tokens: int | None) -> int:
        return self._max_limit if prompt_tokens is None else prompt_tokens

    def _check_chunks(self, command: StepCommand) -> None:
        slots = tuple(chunk.slot for chunk in command.chunks)
        for slot in slots:
            _check("chunks.slot", slot, 1, self._num_slots - 1)
        if len({*slots, *command.slots}) < len(slots) + len(command.slots):
            raise InvalidArgumentError("chunks", slots, "each slot once, and none of those that decode")
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


def check_draft_tokens(command: StepCommand, num_draft_tokens: int, row_tokens: RowTokens) -> None:
    """Raises InvalidArgumentError unless the rows of a step have numbers of draft tokens that they may have.

    `num_draft_tokens`: K. Graphs exist for some numbers only.
    """
    given, evens = command.num_draft_tokens, row_tokens.evens(num_draft_tokens)
    is_even = len(set(given)) == 1 and given[0] in (0, *evens)
    is_accepted = is_even if evens else max(given, default=0) <= num_draft_tokens
    if given and (len(given) != len(command.slots) or not is_accepted):
        accepted = f"for each of {len(command.slots)} slots 0"
        if num_draft_tokens:
            accepted += f", or for each {' or '.join(map(str, evens))}" if evens else f" to {num_draft_tokens}"
        raise InvalidArgumentError("num_draft_tokens", given, accepted)


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgumentError(field, value, f"{low} to {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanges:
    """Changes of slots before a step: made on the host, staged. All tensors are on the device."""

    places: torch.Tensor
    """[W] int64: where the table's `words` change, pages and columns."""
    words: torch.Tensor
    """[W] int64: what they are then."""
    emptied: torch.Tensor | None
    """[E] int64: slots whose page lists begin anew; None where E is 0."""
    params: dict[int, SamplingParams]
    """By slot, on the host: the sampling of the requests that take over slots, T of them."""
    late: set[int]
    """Their slots that have a `history_from` above 0."""
    taken: torch.Tensor | None
    """[T] int64: their slots; None where T is 0."""
    have_cache_salt: torch.Tensor | None
    """[T] bool; None where T is 0."""
    sampling: SamplingRows | None
    """None where T is 0."""
    adjustments: AdjustmentRows | None
    """None if neither these requests nor the ones before them have any."""
