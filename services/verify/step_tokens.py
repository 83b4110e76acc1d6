"""Measures how many tokens a step that takes in prompts may have while sequences decode, which wait for it.

The largest power of two from LEAST to MOST such that a forward over so many tokens of a prompt takes no longer than a
pause may be:

- On a GPU PAUSE_S. Many tokens take hardly longer there than few, so that smaller steps would be dear.
- On a CPU, where a token takes about as long among few as among many, as long as verify's part of a decode step of one
  sequence: then a stream's steps take about twice as long while a prompt comes in beside.

On a CPU a long prompt's attention takes longer than all else. So verify measures the same forward behind a long
context, too, and answers behind which context a step of so many tokens takes twice as long as at the prompt's begin,
with what it decodes. Steps then have fewer tokens of the prompt. A GPU's do not: attention behind 2,000 tokens takes
less than a tenth of a step, and small steps are dear.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from slipstream.common.wire.step import PrefillChunk, SlotUpdate
from slipstream.common.wire.worker import StepTokens
from slipstream.services.worker.graphs import shortest_seconds
from slipstream.services.worker.slots import FlatChunks

if TYPE_CHECKING:
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.language_model import LanguageModel

logger = logging.getLogger(__name__)

LEAST, MOST = 32, 2048
PAUSE_S = 0.05
FAR_TOKENS = 4096
"""The context of the second measurement, where sequences may be so long."""
_SLOT = 1
"""Has no pages yet."""


def measure_step_tokens(model: LanguageModel, state: EpochState) -> StepTokens:
    """Stream work: returns the tokens of a step. Waits for the device. Nothing must run yet."""
    is_cpu = model.device.type == "cpu"
    _put(state, SlotUpdate(slot=_SLOT, generation=0, limit_tokens=state.attachment.context_tokens))
    most_s = shortest_seconds(partial(_decode, model), model.device) if is_cpu else PAUSE_S
    found, found_s, size = LEAST, 0.0, LEAST
    while size <= min(MOST, state.attachment.shape.chunk_tokens):
        seconds = shortest_seconds(partial(_prefill, model, state, size), model.device)
        if size > LEAST and seconds > most_s:
            break
        found, found_s, size = size, seconds, 2 * size
    doubling_context = _doubling_context(model, state, found, found_s, most_s) if is_cpu else None
    logger.info(
        "steps that decode and take in prompts have %d tokens: a prompt's take %.1f ms, a pause may have %.1f ms; "
        "they take twice as long behind %s tokens",
        found,
        1e3 * found_s,
        1e3 * most_s,
        "any number of" if doubling_context is None else doubling_context,
    )
    return StepTokens(min(found, state.attachment.shape.chunk_tokens), doubling_context)


def _doubling_context(
    model: LanguageModel, state: EpochState, num_tokens: int, seconds: float, decode_s: float
) -> int | None:
    """The context behind which a step with `num_tokens` of a prompt takes twice as long as at its begin.

    None if none does. `seconds`: of the prompt's tokens there; `decode_s`: of the other part of the step.
    """
    context = min(FAR_TOKENS, state.attachment.context_tokens - num_tokens)
    if context <= 0:
        return None
    far_s = shortest_seconds(partial(_prefill, model, state, num_tokens, start=context), model.device)
    more_s = far_s - seconds
    # A hundredth is less than what two measurements of the same differ by.
    return None if more_s < seconds / 100 else max(1, round(context * (seconds + decode_s) / more_s))


def _put(state: EpochState, update: SlotUpdate) -> None:
    state.staging.begin(0, (_SLOT,))
    changes = state.slots.changes((update,), state.staging)
    state.staging.flush()
    state.slots.take_over(changes)


def _decode(model: LanguageModel) -> None:
    """One sequence with as many draft tokens as there may be."""
    *_, (slots, tokens, positions) = model.slots.warm_up()
    model.decoder.logits(model.forward(slots, tokens, positions).hidden)


def _prefill(model: LanguageModel, state: EpochState, num_tokens: int, *, start: int = 0) -> None:
    state.staging.begin(0, (_SLOT,))
    chunk = PrefillChunk(slot=_SLOT, start=start, tokens=(0,) * num_tokens, is_last=True)
    chunks = FlatChunks.of((chunk,), state.staging)
    state.staging.flush()
    model.decoder.logits(model.prefill(chunks, chunks.ragged.begins[1:] - 1).hidden)
