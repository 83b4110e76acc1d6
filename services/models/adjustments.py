"""Adjusts logits before a token is chosen from them: bias, penalties, mask.

In vLLM's order: logit bias, repetition penalty, frequency penalty, presence penalty; the mask is last here and first
there, which is the same, as nothing brings a token back from minus infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from slipstream.common.wire.sequence import MAX_LISTED_IDS
from slipstream.services.models.sampler import ParameterRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.wire.sequence import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustmentRows(ParameterRows):
    """The parameters of N rows. Lists of ids have a fixed width, L.

    Id 0 with nothing to add fills up `biased_ids`, the row's first id once more `masked_ids`.
    """

    is_on: Tensor
    """[N] bool: False where the rest changes nothing."""
    repetition_penalty: Tensor
    """[N] float32; 1 is off."""
    frequency_penalty: Tensor
    """[N] float32; 0 is off."""
    presence_penalty: Tensor
    """[N] float32; 0 is off."""
    biased_ids: Tensor
    """[N, L] int64."""
    biases: Tensor
    """[N, L] float32."""
    masked_ids: Tensor
    """[N, L] int64."""
    masked_before: Tensor
    """[N] int64: from this position on there is no mask; 0 where there are no ids."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], *, device: torch.device | None = None) -> AdjustmentRows:
        """Makes a row for each of `params`."""
        rows = cls.off(len(params))  # filled on the host, copied once
        for number, row in enumerate(params):
            rows.is_on[number] = row.adjusts_logits
            rows.repetition_penalty[number] = row.repetition_penalty
            rows.frequency_penalty[number] = row.frequency_penalty
            rows.presence_penalty[number] = row.presence_penalty
            for column, (token, bias) in enumerate(row.logit_bias):
                rows.biased_ids[number, column], rows.biases[number, column] = token, bias
            if ids := row.masked_token_ids:
                rows.masked_ids[number] = torch.tensor((*ids, *ids[:1] * (MAX_LISTED_IDS - len(ids))))
                rows.masked_before[number] = row.masked_before
        return rows.map(lambda column: column.to(device))

    @classmethod
    def off(cls, num_rows: int, *, device: torch.device | None = None) -> AdjustmentRows:
        """Makes a table of rows to `put` into, such as one for each slot."""
        return cls(
            is_on=torch.zeros(num_rows, dtype=torch.bool, device=device),
            repetition_penalty=torch.ones(num_rows, device=device),
            frequency_penalty=torch.zeros(num_rows, device=device),
            presence_penalty=torch.zeros(num_rows, device=device),
            biased_ids=torch.zeros((num_rows, MAX_LISTED_IDS), dtype=torch.int64, device=device),
            biases=torch.zeros((num_rows, MAX_LISTED_IDS), device=device),
            masked_ids=torch.zeros((num_rows, MAX_LISTED_IDS), dtype=torch.int64, device=device),
            masked_before=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


class TokensSoFar(NamedTuple):
    """The tokens of B slots."""

    in_prompt: Tensor
    """[B, V] bool: the token is in the prompt."""
    num_in_output: Tensor
    """[B, V] int32: how often the token is in the output."""


@torch.inference_mode()
def adjust(
    logits: Tensor, table: AdjustmentRows, history: TokenHistory, slots: Tensor, positions: Tensor, chain: Tensor
) -> Tensor:
    """The logits to choose from: [B, W, V] float32.

    `logits`: [B, W, V] float32, left as they are, for the tokens at `positions`: [B, W] int64. `table`, `history`: have
    a row for each slot. `slots`: [B] int64. `chain`: [B, L] int64, L >= W - 1: tokens that the model was given after
    those of the history, the last column of `logits` after all of them, each column before it after one less. On a
    CPU only the rows that ask for something pay for it; elsewhere all do, so that nothing is read back.
    """
    if logits.device.type != "cpu":
        return _adjusted(logits, table.take(slots), history.take(slots), positions, chain)
    on = table.is_on[slots].nonzero()[:, 0]
    if not len(on):
        return logits
    slots = slots[on]
    rows = _adjusted(logits[on], table.take(slots), history.take(slots), positions[on], chain[on])
    return logits.index_copy(0, on, rows)


def _adjusted(logits: Tensor, rows: AdjustmentRows, so_far: TokensSoFar, positions: Tensor, chain: Tensor) -> Tensor:
    biased = _add(logits, rows.biased_ids, rows.biases[:, None])
    penalised = _penalise(biased, rows, *(tokens[:, None] for tokens in so_far))
    if chain.shape[1]:
        penalised = _penalise_chain(penalised, biased, rows, so_far, chain)
    is_masked = positions[:, :, None] < rows.masked_before[:, None, None]
    ids = rows.masked_ids[:, None].expand(-1, logits.shape[1], -1)
    # Selected: minus infinity added to a logit that is infinite or NaN would hide nothing.
    return penalised.scatter(2, ids, torch.where(is_masked, -torch.inf, penalised.gather(2, ids)))


def _penalise(logits: Tensor, rows: AdjustmentRows, in_prompt: Tensor, num_in_output: Tensor) -> Tensor:
    """`logits`: [B, W, X] float32; `in_prompt`, `num_in_output`: of these tokens, or of whole rows of them."""
    is_there = num_in_output > 0
    repetition = torch.where(in_prompt | is_there, rows.repetition_penalty[:, None, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency_penalty[:, None, None] * num_in_output
    return logits - rows.presence_penalty[:, None, None] * is_there


def _penalise_chain(
    penalised: Tensor, biased: Tensor, rows: AdjustmentRows, so_far: TokensSoFar, chain: Tensor
) -> Tensor:
    """Computes the logits of the chain's own tokens again: the chain changes no others."""
    num_columns, length = biased.shape[1], chain.shape[1]
    # [W, L]: which tokens of the chain each column is after.
    first_columns = torch.arange(num_columns, device=chain.device)[:, None] + (length - num_columns + 1)
    is_before = torch.arange(length, device=chain.device) < first_columns
    is_same = chain[:, :, None] == chain[:, None, :]
    more = (is_same[:, None] & is_before[:, None, :]).sum(dim=3)
    in_prompt, num_in_output = (of_tokens.gather(1, chain)[:, None] for of_tokens in so_far)
    tokens = chain[:, None].expand(-1, num_columns, -1)
    # A token that is in the chain twice gets the same value twice.
    return penalised.scatter(2, tokens, _penalise(biased.gather(2, tokens), rows, in_prompt, num_in_output + more))


def _add(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Adds `values` ([B, 1 or W, L]) to the logits ([B, W, V]) of `token_ids` ([B, L], the same in all columns)."""
    shape = (*logits.shape[:2], token_ids.shape[1])
    return logits.scatter_add(2, token_ids[:, None].expand(shape), values.expand(shape))


class TokenHistory:
    """The tokens that each slot has, which the penalties count.

    Every call is stream work of fixed shapes, and reads nothing back.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Takes five bytes for each slot, row 0 (padding) included, and token id."""
        self._vocab_size = vocab_size
        self._in_prompt = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._num_in_output = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)

    def clear(self, rows: Tensor) -> None:
        """Forgets the tokens of slots that other requests take. `rows`: [B] int64."""
        self._in_prompt.index_fill_(0, rows, False)
        self._num_in_output.index_fill_(0, rows, 0)

    def add_prompt(self, rows: Tensor, tokens: Tensor, is_valid: Tensor) -> None:
        """Adds prompt tokens. `rows`: [B] int64; `tokens`: [B, W] int64; `is_valid`: [B, W] bool, False for padding."""
        places = torch.where(is_valid, rows[:, None] * self._vocab_size + tokens, 0)  # the padding row's first token
        self._in_prompt.view(-1).index_fill_(0, places.view(-1), True)

    def add_output(self, rows: Tensor, tokens: Tensor, is_valid: Tensor) -> None:
        """Adds output. `rows`: [B] int64; `tokens`: [B, W] int64; `is_valid`: [B, W] bool, False for what is none."""
        places = rows[:, None] * self._vocab_size + tokens
        self._num_in_output.view(-1).scatter_add_(0, places.view(-1), is_valid.reshape(-1).to(torch.int32))

    def take(self, rows: Tensor) -> TokensSoFar:
        """Copies some rows: [B] int64."""
        return TokensSoFar(self._in_prompt.index_select(0, rows), self._num_in_output.index_select(0, rows))
