"""The output of a sample, kept once and read by any number of watchers."""

from __future__ import annotations

import asyncio
import io
from array import array
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.wire.job import FinishReason, OutputChunk, PlainChunkEncoder, TokenLogprobs
from slipstream.gateway.stop_strings import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from slipstream.common.wire.job import MatchedStop, Usage
    from slipstream.gateway.request import CheckedRequest
    from slipstream.gateway.text import Detokenizer

MAX_CHUNK_TOKENS = 4096
"""A few milliseconds of the event loop's time, in which it serves no other call. Logprobs count like tokens."""

MAX_SHARED_TOKENS = 64
"""A longer chunk is made again for each reader, because a sample keeps the last one as long as it is there."""


class OutputColumns(NamedTuple):
    """The parts of an output from which the rest is made again, as its text from its tokens."""

    token_ids: Sequence[int]
    is_draft: bytes
    logprobs: Sequence[float]
    top_token_ids: Sequence[int]
    top_logprobs: Sequence[float]
    finish_reason: FinishReason | None
    ends_with_token: bool
    is_cut: bool


class SampleOutput:
    """The output of a sample. At most `max_new_tokens` tokens, at 20 to 30 bytes each with their text.

    Tokens become text when they are read for the first time, so a job without a reader costs no such work; with stop
    strings they do at once, and the output is cut behind the token that completes one.
    """

    def __init__(
        self,
        request: CheckedRequest,
        detokenizer: Detokenizer,
        *,
        token_bytes: Callable[[int], bytes] | None = None,
        sample_index: int = 0,
        attempt: int = 0,
    ) -> None:
        """`detokenizer` is this sample's alone. `token_bytes`: what logprobs say of a token; None: nothing."""
        self.token_ids = array("I")
        """Tokens so far. Only `add` changes it."""
        self.num_steps = 0
        """Steps that brought tokens."""
        self.published_ns = 0
        """When the newest token was published, by `time.monotonic_ns`; 0 if it is of another process."""
        self.published_before_ns = 0
        """The same for the step before that."""
        self._job_id = request.job_id
        self._attempt = attempt
        self._sample_index = sample_index
        self._detokenizer: Detokenizer | None = detokenizer
        self._token_bytes = token_bytes
        self._stop = request.stop
        self._stops = StopMatcher(request.stop) if request.stop else None
        self._min_new_tokens = request.min_new_tokens
        self._is_draft = bytearray()
        num_top = request.samples[sample_index].top_logprobs
        self._logprobs = None if num_top is None else LogprobColumns(num_top)
        self._max_chunk_tokens = MAX_CHUNK_TOKENS // (1 + (num_top or 0))
        self._text = io.StringIO()
        self._text_ends = array("I")
        """For each token that is text, the number of code points up to and including its own."""
        self._tail: str | None = None
        """Text held back at the end, if the end came without a token that it could belong to."""
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._ends_with_token = False
        self._last_read: OutputChunk | None = None
        self._encoder: PlainChunkEncoder | None = None
        if not request.stop and num_top is None:
            self._encoder = PlainChunkEncoder(request.job_id, sample_index, attempt)
        self._last_encoded = (0, 0, b"")
        """The part that `read_encoded` returned last, as its first token and the one behind it, and its bytes."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def num_detokenized(self) -> int:
        """Tokens that are text by now."""
        return len(self._text_ends)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly: 30 bytes a token with its text."""
        num_logprobs = 0 if self._logprobs is None else sum(map(len, self._logprobs.columns()))
        return 30 * len(self.token_ids) + 4 * num_logprobs

    @property
    def is_cut(self) -> bool:
        """True once a stop string is complete; output that still comes is ignored."""
        return self._stops is not None and self._stops.matched is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason of the end; None while the sample goes on, and if it failed."""
        return self._finish_reason

    @property
    def matched_stop(self) -> MatchedStop | None:
        """The stop string or token that ended the sample."""
        if self._finish_reason is not FinishReason.STOP:
            return None
        return self._stops.matched if self._stops is not None and self.is_cut else self.token_ids[-1]

    def add(
        self,
        token_ids: Sequence[int],
        num_accepted: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
        reason: FinishReason | None = None,
        *,
        published_ns: int = 0,
    ) -> None:
        """Adds the output of a step: the first `num_accepted` tokens were the draft's. Nothing counts after a cut."""
        if not self.is_cut:
            if token_ids:
                self.token_ids.extend(token_ids)
                self._is_draft += _draft_flags(num_accepted, len(token_ids))
                self.num_steps += 1
                self.published_before_ns, self.published_ns = self.published_ns, published_ns
                if self._logprobs is not None:
                    self._logprobs.extend(logprobs)
            if self._stops is None and reason is None:
                return
            self._finish_reason = reason
            self._ends_with_token = bool(token_ids)
            if self._stops is not None:
                self.detokenize(self.num_tokens)
        if self.is_cut:
            # The sequence may end in any other way after it was cut here.
            self._finish_reason = None if reason is None else FinishReason.STOP

    def reopen(self, detokenizer: Detokenizer, token_bytes: Callable[[int], bytes] | None = None) -> None:
        """Goes on after an end that was none of the output's own. Its tokens become text anew when they are read."""
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._text = io.StringIO()
        self._text_ends = array("I")
        self._last_read = None
        self._last_encoded = (0, 0, b"")
        self._tail = self._finish_reason = self._usage = None
        self._ends_with_token = False
        if self._stop:
            self._stops = StopMatcher(self._stop)
            self.detokenize(self.num_tokens)

    def columns(self) -> OutputColumns:
        """Returns all that `restore` needs."""
        logprobs = ((), (), ()) if self._logprobs is None else self._logprobs.columns()
        return OutputColumns(
            self.token_ids, bytes(self._is_draft), *logprobs, self._finish_reason, self._ends_with_token, self.is_cut
        )

    def restore(self, columns: OutputColumns) -> None:
        """Takes over what was kept of it; nothing was added before."""
        self.token_ids.extend(columns.token_ids)
        self._is_draft += columns.is_draft
        if self._logprobs is not None:
            self._logprobs.restore(columns.logprobs, columns.top_token_ids, columns.top_logprobs)
        self._ends_with_token = columns.ends_with_token
        if columns.is_cut:
            # The end, whichever it was, came after the cut.
            self.detokenize(self.num_tokens)
        self._finish_reason = columns.finish_reason
        if self._stops is not None:
            self.detokenize(self.num_tokens)

    def finish(self, usage: Usage) -> None:
        """Sets the usage, which comes with the last chunk."""
        self._usage = usage

    def can_read(self, offset: int) -> bool:
        """True if `read` from there on returns a chunk."""
        return offset < len(self.token_ids) or self._finish_reason is not None

    def read(self, offset: int) -> OutputChunk | None:
        """A chunk of tokens from `offset` on; None if there are none yet and the sample has not finished.

        Readers at the same place get the same chunk.
        """
        if not self.can_read(offset):
            return None
        num_tokens = len(self.token_ids)
        end = min(num_tokens, offset + self._max_chunk_tokens)
        is_last = self._finish_reason is not None and end == num_tokens
        if (last := self._last_read) is not None and (
            (last.token_offset, len(last.token_ids), last.finish_reason is not None) == (offset, end - offset, is_last)
        ):
            return last
        self.detokenize(end)
        start_character = self._text_ends[offset - 1] if offset else 0
        text_ends = self._text_ends[offset:end]
        self._text.seek(start_character)
        text = self._text.read(text_ends[-1] - start_character) if text_ends else ""
        chunk = OutputChunk(
            job_id=self._job_id,
            token_offset=offset,
            token_ids=tuple(self.token_ids[offset:end]),
            text=text + (self._tail or "") if is_last else text,
            is_draft=tuple(memoryview(self._is_draft[offset:end]).cast("?")),
            text_lengths=tuple(map(sub, text_ends, chain((start_character,), text_ends))),
            logprobs=self._read_logprobs(offset, end),
            sample_index=self._sample_index,
            finish_reason=self._finish_reason if is_last else None,
            matched_stop=self.matched_stop if is_last else None,
            usage=self._usage if is_last else None,
            attempt=self._attempt,
            published_ns=self.published_ns if offset < end else 0,
        )
        self._last_read = chunk if end - offset <= MAX_SHARED_TOKENS else None
        return chunk

    def read_encoded(self, offset: int) -> bytes | None:
        """The message of all tokens from `offset` on, encoded; None where only `read` can say what comes next.

        That is so for a sample with stop strings or logprobs, at its end, and for a reader that is far behind.
        """
        end = len(self.token_ids)
        if self._encoder is None or self._finish_reason is not None or end - offset > MAX_SHARED_TOKENS:
            return None
        if offset == end:
            return None
        last_offset, last_end, encoded = self._last_encoded
        if (last_offset, last_end) == (offset, end):
            return encoded
        if len(self._text_ends) != offset:
            return None
        token_ids = self.token_ids[offset:]
        text, lengths = self._present_detokenizer.push_all(token_ids)
        encoded = self._encoder.encode(offset, token_ids, text, self._is_draft[offset:], lengths, self.published_ns)
        self._append(text, lengths)
        self._last_encoded = (offset, end, encoded)
        return encoded

    @property
    def _present_detokenizer(self) -> Detokenizer:
        assert self._detokenizer is not None, "all was text before the tokenizer was forgotten"
        return self._detokenizer

    async def forget_tokenizer(self) -> None:
        """Detokenizes all of an output that is over, in turns, and lets go of the tokenizer."""
        if self._detokenizer is not None:
            with suppress(Exception):  # its readers get the error
                await self.detokenize_in_turns(self.num_tokens)
                self.detokenize(self.num_tokens)
        self._detokenizer = None
        if self._token_bytes is not None:
            used = set() if self._logprobs is None else {*self.token_ids, *self._logprobs.columns()[1]}
            self._token_bytes = {token: self._token_bytes(token) for token in used}.__getitem__

    def _read_logprobs(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        if self._logprobs is None:
            return ()
        found, token_bytes = self._logprobs.read(start, end), self._token_bytes
        if token_bytes is None:
            return found
        return tuple(
            TokenLogprobs(one.logprob, one.top, token_bytes(token), tuple(token_bytes(top) for top, _ in one.top))
            for token, one in zip(self.token_ids[start:end], found, strict=True)
        )

    async def detokenize_in_turns(self, end: int) -> None:
        """Detokenizes bit by bit, so that the event loop serves other calls in between."""
        while self.num_detokenized < end:
            self.detokenize(min(end, self.num_detokenized + MAX_CHUNK_TOKENS))
            await asyncio.sleep(0)

    def detokenize(self, end: int) -> None:
        """Turns the tokens before `end` into text."""
        start = self.num_detokenized
        is_end = self._finish_reason is not None and end == self.num_tokens
        last = end - (is_end and self._ends_with_token)
        if start < last:
            text, lengths = self._present_detokenizer.push_all(self.token_ids[start:last])
            if self._stops is None or self._stops.passes(text):
                self._append(text, lengths)
            else:
                self._append_certain(text, lengths, start)
        if is_end and self._tail is None and not self.is_cut:
            self._detokenize_end(end)

    def _append_certain(self, text: str, lengths: list[int], start: int) -> None:
        """Appends the text of the tokens from `start` on, as far as it cannot belong to a stop string."""
        character = 0
        for index, length in enumerate(lengths, start):
            certain = self._certain(text[character : character + length], index)
            character += length
            self._append(certain, [len(certain)])
            if self.is_cut:
                self._truncate(index + 1)
                return

    def _detokenize_end(self, end: int) -> None:
        """Turns into text the token that the end came with, if there is one, and the text held back so far."""
        if not self._ends_with_token:
            self._tail = self._rest_of_text("", end)
            return
        self._tail = ""
        # A token that stops the output is no part of the text.
        is_shown = self._finish_reason is not FinishReason.STOP
        text = self._present_detokenizer.push(self.token_ids[end - 1]) if is_shown else ""
        text = self._rest_of_text(text, end - 1)
        self._append(text, [len(text)])

    def _append(self, text: str, lengths: list[int]) -> None:
        self._text.seek(0, io.SEEK_END)
        self._text.write(text)
        lengths[0] += self._text_ends[-1] if self._text_ends else 0
        self._text_ends.extend(accumulate(lengths))

    def _rest_of_text(self, text: str, index: int) -> str:
        """`text` with the text held back so far."""
        certain = self._certain(text + self._present_detokenizer.finish(), index)
        return certain if self._stops is None else certain + self._stops.finish()

    def _certain(self, text: str, index: int) -> str:
        """The part of the text so far that cannot belong to a stop string, when `text` came with token `index`."""
        return text if self._stops is None else self._stops.push(text, counts=index >= self._min_new_tokens)

    def _truncate(self, num_tokens: int) -> None:
        """Drops the tokens that the same step brought after the stop; they were never sent."""
        del self.token_ids[num_tokens:]
        del self._is_draft[num_tokens:]
        if self._logprobs is not None:
            self._logprobs.truncate(num_tokens)
        self._tail = ""


class LogprobColumns:
    """The logprobs of a sample in float32: 4 bytes a token, and 8 for each of the top tokens at its place."""

    def __init__(self, num_top: int) -> None:
        """`num_top`: top tokens at each place."""
        self._num_top = num_top
        self._own = array("f")
        self._top_ids = array("I")
        self._top = array("f")

    def extend(self, tokens: Iterable[TokenLogprobs]) -> None:
        """Appends the logprobs of the next tokens."""
        for token in tokens:
            assert len(token.top) == self._num_top, f"{len(token.top)} logprobs where {self._num_top} were asked for"
            self._own.append(token.logprob)
            for token_id, logprob in token.top:
                self._top_ids.append(token_id)
                self._top.append(logprob)

    def truncate(self, num_tokens: int) -> None:
        """Drops all but the first `num_tokens`."""
        del self._own[num_tokens:]
        del self._top_ids[num_tokens * self._num_top :]
        del self._top[num_tokens * self._num_top :]

    def columns(self) -> tuple[Sequence[float], Sequence[int], Sequence[float]]:
        """The tokens' own logprobs, the ids of the top tokens and their logprobs."""
        return self._own, self._top_ids, self._top

    def restore(self, own: Iterable[float], top_ids: Iterable[int], top: Iterable[float]) -> None:
        """Takes over what `columns` returned."""
        self._own.extend(own)
        self._top_ids.extend(top_ids)
        self._top.extend(top)

    def read(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """The logprobs of the tokens [start, end)."""
        return tuple(self._read(index) for index in range(start, end))

    def _read(self, index: int) -> TokenLogprobs:
        row = slice(index * self._num_top, (index + 1) * self._num_top)
        return TokenLogprobs(self._own[index], tuple(zip(self._top_ids[row], self._top[row], strict=True)))


@lru_cache(maxsize=256)
def _draft_flags(num_draft: int, num_tokens: int) -> bytes:
    """A flag for each token: 1 for the first `num_draft`, else 0."""
    num_draft = min(num_draft, num_tokens)
    return b"\1" * num_draft + bytes(num_tokens - num_draft)
