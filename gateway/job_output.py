"""What came of one of a job's samples: its tokens and their text, kept once and read by any number of watchers."""

from __future__ import annotations

import io
from array import array
from functools import lru_cache
from itertools import accumulate, chain
from operator import sub
from typing import TYPE_CHECKING

from slipstream.common.api.output_chunk import FinishReason, OutputChunk
from slipstream.gateway.logprob_columns import LogprobColumns
from slipstream.gateway.stop_strings import StopMatcher

if TYPE_CHECKING:
    from slipstream.common.api.output_chunk import MatchedStop, Usage
    from slipstream.gateway.checked_request import CheckedRequest
    from slipstream.gateway.detokenizer import Detokenizer
    from slipstream.scheduler.core.sequence import SequenceOutput

MAX_CHUNK_TOKENS = 4096
"""A few milliseconds of the event loop's time, in which it serves nobody else. Logprobs count like tokens."""


class JobOutput:
    """The output of a sample. At most `max_new_tokens` tokens, at 20 to 30 bytes each with their text.

    Tokens become text when they are read for the first time, so a job that nobody watches costs no such work; with stop
    strings they do at once, and the output is cut behind the token that completes one.
    """

    def __init__(self, request: CheckedRequest, detokenizer: Detokenizer, *, sample_index: int = 0) -> None:
        """`detokenizer` is this sample's alone."""
        self._job_id = request.job_id
        self._sample_index = sample_index
        self._detokenizer = detokenizer
        self._stops = StopMatcher(request.stop) if request.stop else None
        self._min_new_tokens = request.min_new_tokens
        self._token_ids = array("I")
        self._is_draft = bytearray()
        num_top = request.samples[sample_index].top_logprobs
        self._logprobs = None if num_top is None else LogprobColumns(num_top)
        self._max_chunk_tokens = MAX_CHUNK_TOKENS // (1 + (num_top or 0))
        self._text = io.StringIO()
        self._text_ends = array("I")
        """For each token that is text by now, how many code points there are up to and with its own."""
        self._tail: str | None = None
        """What is left at the end, when the end came without a token that it could belong to."""
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._ends_with_token = False

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def num_spelled(self) -> int:
        """Those of them that are text by now."""
        return len(self._text_ends)

    @property
    def is_cut(self) -> bool:
        """Whether a stop string is complete: there will be no more tokens, whatever the loop still brings."""
        return self._stops is not None and self._stops.matched is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sample ended; None while it goes on, and for one that failed."""
        return self._finish_reason

    @property
    def matched_stop(self) -> MatchedStop | None:
        """What stopped the sample."""
        if self._finish_reason is not FinishReason.STOP:
            return None
        return self._stops.matched if self._stops is not None and self.is_cut else self._token_ids[-1]

    def add(self, *steps: SequenceOutput) -> SequenceOutput | None:
        """Adds what steps brought, one at least. Returns the last of all, if it is one of them."""
        was_cut = self.is_cut
        for progress in steps:
            if not was_cut:
                self._token_ids.extend(progress.token_ids)
                self._is_draft.extend(_draft_flags(progress.num_draft, len(progress.token_ids)))
                if self._logprobs is not None:
                    self._logprobs.extend(progress.logprobs)
            if progress.is_last:
                break
        if not was_cut:
            self._finish_reason = progress.finish_reason
            self._ends_with_token = bool(progress.token_ids)
            if self._stops is not None:
                self.spell(self.num_tokens)
        if self.is_cut:
            # However the loop comes to the end of what was cut here.
            self._finish_reason = FinishReason.STOP if progress.is_last else None
        return progress if progress.is_last else None

    def finish(self, usage: Usage) -> None:
        """Says what the sample took; the last chunk has it."""
        self._usage = usage

    def read(self, offset: int) -> OutputChunk | None:
        """The tokens from `offset` on, many at most; None if there are none yet, and the sample has not finished."""
        num_tokens = len(self._token_ids)
        end = min(num_tokens, offset + self._max_chunk_tokens)
        is_last = self._finish_reason is not None and end == num_tokens
        if offset == end and not is_last:
            return None
        self.spell(end)
        start_character = self._text_ends[offset - 1] if offset else 0
        text_ends = self._text_ends[offset:end]
        self._text.seek(start_character)
        text = self._text.read(text_ends[-1] - start_character) if text_ends else ""
        return OutputChunk(
            job_id=self._job_id,
            token_offset=offset,
            token_ids=tuple(self._token_ids[offset:end]),
            text=text + (self._tail or "") if is_last else text,
            is_draft=tuple(memoryview(self._is_draft[offset:end]).cast("?")),
            text_lengths=tuple(map(sub, text_ends, chain((start_character,), text_ends))),
            logprobs=() if self._logprobs is None else self._logprobs.read(offset, end),
            sample_index=self._sample_index,
            finish_reason=self._finish_reason if is_last else None,
            matched_stop=self.matched_stop if is_last else None,
            usage=self._usage if is_last else None,
        )

    def spell(self, end: int) -> None:
        """Turns tokens into text, up to token `end`; those that are text already stay as they are."""
        start = self.num_spelled
        is_end = self._finish_reason is not None and end == self.num_tokens
        last = end - (is_end and self._ends_with_token)
        if start < last:
            text, lengths = self._detokenizer.push_all(self._token_ids[start:last])
            if self._stops is None or self._stops.passes(text):
                self._append(text, lengths)
            else:
                self._append_certain(text, lengths, start)
        if is_end and self._tail is None and not self.is_cut:
            self._spell_end(end)

    def _append_certain(self, text: str, lengths: list[int], start: int) -> None:
        """Appends what no stop string takes away of the text of the tokens from `start` on."""
        character = 0
        for index, length in enumerate(lengths, start):
            certain = self._certain(text[character : character + length], index)
            character += length
            self._append(certain, [len(certain)])
            if self.is_cut:
                self._truncate(index + 1)
                return

    def _spell_end(self, end: int) -> None:
        """Spells the last token, if there is one that the end came with, and what is left."""
        if not self._ends_with_token:
            self._tail = self._spell_rest("", end)
            return
        self._tail = ""
        # A token that stops the output is no part of the text.
        is_shown = self._finish_reason is not FinishReason.STOP
        text = self._detokenizer.push(self._token_ids[end - 1]) if is_shown else ""
        text = self._spell_rest(text, end - 1)
        self._append(text, [len(text)])

    def _append(self, text: str, lengths: list[int]) -> None:
        """Appends text of the next tokens."""
        self._text.seek(0, io.SEEK_END)
        self._text.write(text)
        lengths[0] += self._text_ends[-1] if self._text_ends else 0
        self._text_ends.extend(accumulate(lengths))

    def _spell_rest(self, text: str, index: int) -> str:
        """`text` and what was not certain until now."""
        certain = self._certain(text + self._detokenizer.finish(), index)
        return certain if self._stops is None else certain + self._stops.finish()

    def _certain(self, text: str, index: int) -> str:
        """What no stop string takes away, when `text` came with token `index`."""
        return text if self._stops is None else self._stops.push(text, counts=index >= self._min_new_tokens)

    def _truncate(self, num_tokens: int) -> None:
        """Leaves out what the same step brought behind the stop: nobody has seen it."""
        del self._token_ids[num_tokens:]
        del self._is_draft[num_tokens:]
        if self._logprobs is not None:
            self._logprobs.truncate(num_tokens)
        self._tail = ""


@lru_cache(maxsize=256)
def _draft_flags(num_draft: int, num_tokens: int) -> bytes:
    """For each of so many tokens, whether it is one of the first `num_draft`."""
    return b"\1" * num_draft + bytes(num_tokens - num_draft)
