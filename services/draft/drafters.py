"""The ways to draft a chain, each token sampled with the noise that verify will use at its place.

A language model of its own, or a head, which reads the target's hidden states (`services/models/heads.py`). Entry p of
the head's module i pairs a state of position p, which is the target's or what module i - 1 left there, with the token
at p + i; its keys and values are those of position p. A chunk [s, e) of a prompt has the states s .. e-1 and the tokens
s .. e-1, so the entries s-i .. e-1-i are made of it: the state at s-i is kept here from the chunk before. The entries
at the prompt's end pair with the first sampled token, which is in the stash of the first decode step like every
other, and with drafted ones. Entries of drafted tokens are made again in the next step, with the tokens that verify
chose: a module's entries of a step begin where those of known tokens ended in the step before.

A DFlash drafter (`BlockDrafter`) has no entries: the keys and values of its position p depend on the tokens up to p.

A head that attached beside a running request has no entries before the slot's `history_from`: nothing is kept there,
and attention masks it. Behind pages of the prefix cache the first chunk has no state before it; the entries that would
need one are in those pages already. Both are before `written_from`, and so is each entry that is made of one of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from slipstream.common.errors import MismatchError
from slipstream.services.worker.graphs import at_once
from slipstream.services.worker.language_model import PagedSlots
from slipstream.services.worker.slots import SamplingMode

if TYPE_CHECKING:
    from slipstream.services.models.attention import ForwardBatch
    from slipstream.services.models.heads import DFlashHead, DraftHead
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import NextStepState
    from slipstream.services.worker.language_model import LanguageModel, SlotRows
    from slipstream.services.worker.slots import FlatChunks


class StandaloneDrafter:
    """Implements `Drafter` with a language model that has the target's tokenizer (Leviathan et al., 2023)."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def open(self, state: EpochState) -> None:
        self._model.open(state)
        at_once(self._model.capture_prompts())

    def close(self) -> None:
        self._model.close()

    def prefill(self, chunks: FlatChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`. A language model reads no hidden states."""
        self._model.prefill(chunks, chunks.slots[:0])

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """See `Drafter.propose`.

        The first forward also takes the token before the bonus: when all of the last draft was accepted,
        its last token was never an input here, and has no KV yet. For the others it writes what is there.
        """
        slots = self._model.slots.take(rows)
        self._model.slots.record_output(rows, stash.last_tokens, stash.num_new)
        before = stash.last_tokens.gather(1, (stash.num_new - 2).clamp(min=0)[:, None])
        tokens = torch.cat((before, stash.bonus_tokens[:, None]), dim=1)
        positions = stash.seq_lens[:, None] + torch.arange(-1, 1, device=tokens.device)
        is_valid = torch.stack((stash.num_new > 1, torch.ones_like(stash.num_new, dtype=torch.bool)), dim=1)
        output = self._model.forward(slots, tokens, positions.clamp(min=0), is_valid=is_valid)
        # [num_tokens, B, 1]: where the tokens are written.
        ahead = (stash.seq_lens + torch.arange(1, num_tokens + 1, device=tokens.device)[:, None])[:, :, None]
        sample, logits = self._model.slots.sample, self._model.decoder.logits
        proposed = [sample(slots, logits(output.hidden[:, -1:]), ahead[0], mode)]
        while len(proposed) < num_tokens:
            number = len(proposed)
            output = self._model.forward(slots, proposed[-1], ahead[number - 1])
            chain = torch.cat(proposed, dim=1) if mode is SamplingMode.ADJUSTMENTS else None
            proposed.append(sample(slots, logits(output.hidden), ahead[number], mode, chain))
        return torch.cat(proposed, dim=1)


class HeadDrafter:
    """Implements `Drafter` with a head."""

    def __init__(self, head: DraftHead, device: torch.device, dtype: torch.dtype, *, keeps_fp8: bool = False) -> None:
        """`keeps_fp8`: see `PagedSlots`."""
        self._head = head
        self._device = device
        self._dtype = dtype
        self._slots = PagedSlots(head.config.layer, device, dtype, keeps_fp8=keeps_fp8)
        self._samples_own_ids = False
        self._num_modules = 0
        """Modules in use: one for each draft token at most."""
        self._kept = torch.empty(0)
        """[modules, slots, hidden_size]: the state that each module's next entry pairs with the slot's next token."""

    def open(self, state: EpochState) -> None:
        """See `Drafter.open`. Runs what a step runs, so that the first request finds it warm."""
        shape, num_modules = state.attachment.shape, self._head.config.layer.num_layers
        self._attach(state)
        self._num_modules = min(num_modules, shape.num_draft_tokens)
        size, width = (shape.num_slots, self._head.config.layer.hidden_size), state.region.shape.hidden_width
        self._kept = torch.zeros((self._num_modules, *size), dtype=self._dtype, device=self._device)
        for slots, tokens, positions in self._slots.warm_up():
            states = self._head.fuse(torch.zeros((1, tokens.shape[1], width), dtype=self._dtype, device=self._device))
            for module in range(self._num_modules):
                states = self._forward(slots, tokens, positions, states, module)
                self._sample(slots, states[:, -1:], positions[:, -1:] + module + 2, SamplingMode.FILTERS)

    def _attach(self, state: EpochState) -> None:
        self._head.borrow(state.weights)
        self._slots.open(state)
        # Ids that the target lacks, as of padding, would be sampled like any other.
        head = self._head
        self._samples_own_ids = head.samples_own_ids and int(head.token_ids[-1]) < state.slots.vocab_size

    def close(self) -> None:
        self._head.give_back()
        self._slots.close()
        self._kept = torch.empty(0)

    def prefill(self, chunks: FlatChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`. Each token goes with the state before it; the first of a prompt has none."""
        assert hidden is not None, "the description asks for hidden states"
        self._slots.record_prompt(chunks)
        slots, ragged = self._slots.take(chunks.slots), chunks.ragged
        states, positions = self._head.fuse(hidden.to(self._dtype)), chunks.positions
        written_from = slots.written_from.index_select(0, ragged.rows)
        for module, kept in enumerate(self._kept):
            before = states.roll(1, dims=0)
            before.index_copy_(0, ragged.begins[:-1], kept.index_select(0, chunks.slots))
            kept.index_copy_(0, chunks.slots, states.index_select(0, ragged.begins[1:] - 1))
            positions = positions - 1
            is_valid = positions >= written_from
            # Of the last module nothing but keys and values is read: a decode step makes the state that drafts.
            none = positions[:0] if module == self._num_modules - 1 else None
            batch = self._slots.batch(slots, chunks.tokens, positions.clamp(min=0), is_valid, ragged, none)
            states = self._head(batch, before, self._slots.cache, module)

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """See `Drafter.propose`.

        Each module first makes the entries of the last step's new tokens, and after them those of the tokens that the
        modules before it have drafted. For tokens without a module the last one goes on with its own state. Each module
        guesses one in any case.
        """
        assert stash.hidden_states is not None, "the description asks for hidden states"
        slots = self._slots.take(rows)
        self._slots.record_output(rows, stash.last_tokens, stash.num_new)
        num_tokens = max(num_tokens, self._num_modules)
        # [num_tokens + 1, B, 1]: where the entries are, the first of which is made, and where their tokens are written.
        ahead = (stash.seq_lens + torch.arange(num_tokens + 1, device=self._device)[:, None])[:, :, None]
        proposed: list[torch.Tensor] = []

        def choose(state: torch.Tensor) -> None:
            chain = torch.cat(proposed, dim=1) if proposed and mode is SamplingMode.ADJUSTMENTS else None
            proposed.append(self._sample(slots, state, ahead[len(proposed) + 1], mode, chain))

        tokens, last = stash.last_tokens, (stash.num_new - 1)[:, None]
        begin = stash.seq_lens[:, None] - stash.num_new[:, None]
        states = self._head.fuse(stash.hidden_states.to(self._dtype))
        for module, kept in enumerate(self._kept):
            if module:
                tokens = F.pad(tokens, (0, 1)).scatter(1, last + module, proposed[-1])
                settled = states.gather(1, _columns(stash.num_new - 1, states))[:, 0]
                states = torch.cat((kept.index_select(0, rows)[:, None], states), dim=1)
                kept.index_copy_(0, rows, settled)
            columns = torch.arange(tokens.shape[1], device=self._device)
            positions = begin - module + torch.minimum(columns, last + module)
            is_valid = (columns <= last + module) & (positions >= slots.written_from[:, None])
            states = self._forward(slots, tokens, positions.clamp(min=0), states, module, is_valid)
            state = states.gather(1, _columns(stash.num_new - 1 + module, states))
            choose(state)
        while len(proposed) < num_tokens:
            position = ahead[len(proposed) - self._num_modules]
            state = self._forward(slots, proposed[-1], position, state, self._num_modules - 1)
            choose(state)
        return torch.cat(proposed, dim=1)

    def _forward(
        self,
        slots: SlotRows,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        module: int,
        is_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch = self._slots.batch(slots, tokens, positions, is_valid)
        return self._head(batch, states, self._slots.cache, module)  # type: ignore[no-any-return]

    def _sample(
        self,
        slots: SlotRows,
        states: torch.Tensor,
        positions: torch.Tensor,
        mode: SamplingMode,
        chain: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if mode is SamplingMode.ADJUSTMENTS or not self._samples_own_ids:
            return self._slots.sample(slots, self._head.logits(states), positions, mode, chain)
        logits, ids = self._head.own_logits(states), self._head.token_ids
        return self._slots.sample(slots, logits, positions, mode, token_ids=ids)


class BlockDrafter(HeadDrafter):
    """Implements `Drafter` with a DFlash drafter: all tokens come of one forward, and none depends on another one.

    The keys and values of a position are those of the target's state there: a chunk's are made with it, those of a
    step's new tokens with the next block, which writes its own after them. The next step writes over these.
    """

    def __init__(self, head: DFlashHead, device: torch.device, dtype: torch.dtype, *, keeps_fp8: bool = False) -> None:
        super().__init__(head, device, dtype, keeps_fp8=keeps_fp8)
        self._blocks = head

    def open(self, state: EpochState) -> None:
        """See `Drafter.open`. Raises `MismatchError` for more draft tokens than a block has."""
        shape, most = state.attachment.shape, self._blocks.config.max_draft_tokens
        if shape.num_draft_tokens > most:
            raise MismatchError(
                [f"num_draft_tokens: {shape.num_draft_tokens}, and a block has {most} beside its first"]
            )
        self._attach(state)
        for slots, tokens, positions in self._slots.warm_up():
            states = torch.zeros((1, tokens.shape[1], state.region.shape.hidden_width), dtype=self._dtype)
            context = self._slots.batch(slots, tokens, positions)
            output = self._draft(slots, tokens, positions, context, states.to(self._device))
            self._sample(slots, output, positions, SamplingMode.FILTERS)

    def prefill(self, chunks: FlatChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`."""
        assert hidden is not None, "the description asks for hidden states"
        self._slots.record_prompt(chunks)
        slots, ragged, positions = self._slots.take(chunks.slots), chunks.ragged, chunks.positions
        is_valid = positions >= slots.written_from.index_select(0, ragged.rows)
        context = self._slots.batch(slots, chunks.tokens, positions, is_valid, ragged, positions[:0])
        self._blocks.keep(context, self._head.fuse(hidden.to(self._dtype)), self._slots.cache)

    def propose(self, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode) -> torch.Tensor:
        """See `Drafter.propose`."""
        assert stash.hidden_states is not None, "the description asks for hidden states"
        slots = self._slots.take(rows)
        self._slots.record_output(rows, stash.last_tokens, stash.num_new)
        columns = torch.arange(stash.last_tokens.shape[1], device=self._device)
        positions = (stash.seq_lens - stash.num_new)[:, None] + columns
        is_valid = (columns < stash.num_new[:, None]) & (positions >= slots.written_from[:, None])
        context = self._slots.batch(slots, stash.last_tokens, positions.clamp(min=0), is_valid)
        tokens = F.pad(stash.bonus_tokens[:, None], (0, num_tokens), value=self._blocks.config.mask_token_id)
        ahead = stash.seq_lens[:, None] + torch.arange(num_tokens + 1, device=self._device)
        states = self._draft(slots, tokens, ahead, context, stash.hidden_states)[:, 1:]
        places = ahead[:, 1:]
        if mode is not SamplingMode.ADJUSTMENTS:
            return self._sample(slots, states, places, mode)
        chain = places[:, :0]  # of each row: penalties depend on the tokens before
        for column in range(num_tokens):
            at = slice(column, column + 1)
            chain = torch.cat((chain, self._sample(slots, states[:, at], places[:, at], mode, chain)), dim=1)
        return chain

    def _draft(
        self,
        slots: SlotRows,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardBatch,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Runs blocks of W tokens, all of which see one another, after their contexts: [B, W, hidden_size]."""
        block = self._slots.batch(slots, tokens, positions)
        block = replace(block, last_seen=positions[:, -1:].expand_as(positions))
        return self._blocks.draft(block, context, self._head.fuse(hidden.to(self._dtype)), self._slots.cache)


def _columns(columns: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """One column of each row, as an index for `gather`: [B] to [B, 1, size]."""
    return columns[:, None, None].expand(-1, 1, states.shape[2])
