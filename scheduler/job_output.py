"""What came of a job: its tokens and their text, kept once and read by any number of watchers."""

from __future__ import annotations

import io
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

from slipstream.common.chunk import Chunk, FinishReason

if TYPE_CHECKING:
    from slipstream.common.chunk import Usage
    from slipstream.scheduler.detokenizer import Detokenizer
    from slipstream.scheduler.jobs import Progress

MAX_CHUNK_TOKENS = 4096
"""A few milliseconds of the event loop's time, in which it serves nobody else."""


class JobOutput:
    """The output of one job. At most `max_new_tokens` tokens, at 20 to 30 bytes each with their text.

    Tokens become text when they are read for the first time, so a job that nobody watches costs no such work.
    """

    def __init__(self, job_id: str, detokenizer: Detokenizer) -> None:
        """`detokenizer` is this job's alone."""
        self._job_id = job_id
        self._detokenizer = detokenizer
        self._token_ids = array("I")
        self._is_draft = bytearray()
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
    def finish_reason(self) -> FinishReason | None:
        """Why the job ended; None while it goes on, and for one that failed."""
        return self._finish_reason

    def add(self, progress: Progress) -> None:
        """Adds what a step brought."""
        self._token_ids.extend(progress.token_ids)
        self._is_draft.extend(progress.is_draft)
        self._finish_reason = progress.finish_reason
        self._ends_with_token = bool(progress.token_ids)

    def finish(self, usage: Usage) -> None:
        """Says what the job took; the last chunk has it."""
        self._usage = usage

    def read(self, offset: int) -> Chunk | None:
        """The tokens from `offset` on, many at most; None if there are none yet, and the job has not finished."""
        end = min(self.num_tokens, offset + MAX_CHUNK_TOKENS)
        is_last = self._finish_reason is not None and end == self.num_tokens
        if offset == end and not is_last:
            return None
        self.spell(end)
        start_character = self._text_ends[offset - 1] if offset else 0
        text_ends = self._text_ends[offset:end]
        self._text.seek(start_character)
        text = self._text.read(text_ends[-1] - start_character) if text_ends else ""
        return Chunk(
            job_id=self._job_id,
            token_offset=offset,
            token_ids=tuple(self._token_ids[offset:end]),
            text=text + (self._tail or "") if is_last else text,
            is_draft=tuple(map(bool, self._is_draft[offset:end])),
            text_lengths=tuple(after - before for before, after in pairwise((start_character, *text_ends))),
            finish_reason=self._finish_reason if is_last else None,
            usage=self._usage if is_last else None,
        )

    def spell(self, end: int) -> None:
        """Turns tokens into text, up to token `end`; those that are text already stay as they are."""
        self._text.seek(0, io.SEEK_END)
        for index in range(self.num_spelled, end):
            text = self._spell_token(index)
            before = self._text_ends[-1] if self._text_ends else 0
            self._text.write(text)
            self._text_ends.append(before + len(text))
        if self._tail is None and self._finish_reason is not None and end == self.num_tokens:
            self._tail = "" if self._ends_with_token else self._detokenizer.finish()

    def _spell_token(self, index: int) -> str:
        is_end = self._finish_reason is not None and self._ends_with_token and index == self.num_tokens - 1
        # A token that stops the output is no part of the text.
        is_shown = not (is_end and self._finish_reason is FinishReason.STOP)
        text = self._detokenizer.push(self._token_ids[index]) if is_shown else ""
        return text + self._detokenizer.finish() if is_end else text
