"""The journal of jobs: what is in it survives the gateway's process.

It has times since 1970, because those of `time.monotonic` begin anew with each boot. The clock may be set between two
of them: they say when something was, and decide nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from slipstream.common.errors import ResourceExhaustedError, SlipstreamError, UnavailableError
from slipstream.common.rpc.shutdown import raise_failure
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import Refusal, SequenceSpec, StepOutput
from slipstream.gateway.job import Job
from slipstream.gateway.journal_file import Accepted, Forgotten, Saved
from slipstream.gateway.journal_repair import Damage
from slipstream.gateway.metrics import DISCONNECTED
from slipstream.gateway.request import MAX_SAMPLES, CheckedRequest, samples_of
from slipstream.protos import journal_pb2, scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from slipstream.gateway.journal_file import Change, JournalFile, StoredJob
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.sample import Sample


RETRY_AFTER_MS = 1000
"""For clients whose job failed because the disk is full."""
LOOK_FOR_ROOM_S = 1.0
"""Between two looks at whether the disk has room again."""
_RESTORED_AT_ONCE = 32

logger = logging.getLogger(__name__)
_ID_LENGTH = re.compile(rb"\x0a[\x80-\xff]*[\x00-\x7f]\x1a([\x00-\x80])\x01?", re.DOTALL)
"""After the length of JournaledJob's first field, that of the job's id, of 128 bytes at most, in the sequence."""


class Journal:
    """Writes what happens to jobs, in order, on a thread of its own. Its methods belong to the event loop.

    A commit covers everything that was given until it begins. After it, the event loop calls the `then` of each item,
    in order: until then no client may see what the item says. Without a file every `then` is called at once.
    """

    def __init__(
        self,
        file: JournalFile | None,
        *,
        on_failure: Callable[[SlipstreamError], None],
        on_writable: Callable[[bool], None] = lambda _: None,
        save: Callable[[Sequence[int]], None],
    ) -> None:
        """Made on the event loop. The other three are called there.

        `on_failure`: a commit failed, and all that was given until then is lost; it must end every job that goes on.
        `on_writable`: False from then on, True when there is room again, or a commit succeeds. `save` must call `saved`
        or `forget` for each of these jobs.
        """
        self._file = file
        self._on_failure = on_failure
        self._on_writable = on_writable
        self._until_room: asyncio.Task[None] | None = None
        """While the last commit failed and there is no room."""
        self._save = save
        self._loop = asyncio.get_running_loop()
        self._flushes: set[asyncio.Future[None]] = set()
        self._next_step = 1 if file is None else file.next_step
        """Number of the first step whose output the jobs in memory do not have yet."""
        self._changed = threading.Condition()
        self._pending: list[_Item] = []
        self._has_failed = False
        """From a failed commit until the event loop has ended its jobs."""
        self._is_closed = False
        self._is_saving = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if file is not None:
            self._thread.start()

    def accepted(self, number: int, record: bytes, output: bytes | None = None) -> None:
        """Adds a job that begins, perhaps with output that it has, or a changed record. Job numbers only grow."""
        self._put(_Item(Accepted(number, record, output)))

    def outputs(self, rows: bytes, then: Callable[[], None] | None = None) -> None:
        """Adds the output of a step, for any number of jobs that were accepted before."""
        self._put(_Item(rows=rows, then=then))

    def saved(self, number: int, output: bytes, ended_ns: int | None = None) -> None:
        """Adds the whole output of a job that has ended (in nanoseconds since 1970), or that goes on.

        Of a job that goes on: the output of every step whose `then` was called, and of none after it. Not called from a
        `then`, because others of the same commit may follow.
        """
        self._put(_Item(Saved(number, output, self._next_step, ended_ns)))

    def forget(self, number: int) -> None:
        """Removes a job."""
        self._put(_Item(Forgotten(number)))

    def after(self, then: Callable[[], None]) -> None:
        """Calls `then` when everything given so far is committed."""
        self._put(_Item(then=then))

    async def flush(self) -> None:
        """Returns when everything given so far is committed. Raises the error that prevents it."""
        if self._file is None:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._flushes.add(future)
        self.after(lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            self._flushes.discard(future)

    async def close(self) -> None:
        """Commits everything given so far, and closes the file. What is given later is lost."""
        self._set_writable()
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._file is not None:
            await asyncio.to_thread(self._thread.join)

    def _put(self, item: _Item) -> None:
        if self._file is None:
            if item.then is not None:
                item.then()
            return
        with self._changed:
            self._pending.append(item)
            if len(self._pending) == 1:
                self._changed.notify()

    def _run(self) -> None:
        assert self._file is not None, "a journal without a file has no thread"
        while True:
            with self._changed:
                while (self._has_failed or not self._pending) and not self._is_closed:
                    self._changed.wait()
                items, self._pending = self._pending, []
                if self._has_failed or not items:
                    break
            self._commit(self._file, items)
        self._file.close()

    def _commit(self, file: JournalFile, items: list[_Item]) -> None:
        try:
            changes = [item.change for item in items if item.change is not None]
            rows = [item.rows for item in items if item.rows is not None]
            num_before = file.num_changes
            step = file.commit(changes, rows) if changes or rows else file.next_step - 1
            # What writes nothing, as the end of a job that is not there, says nothing of the disk.
            has_written = file.num_changes != num_before
            self._call(self._commit_is_done, items, step, file.jobs_to_save(), has_written)
            file.collect()
        except sqlite3.Error as error:
            with self._changed:
                self._has_failed = True
            self._call(self._fail, error)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop ended before the journal was closed.
            assert self._loop.is_closed(), "an event loop that runs takes calls"

    def _commit_is_done(self, items: list[_Item], step: int, to_save: list[int], has_written: bool) -> None:
        if has_written:
            self._set_writable()
        for item in items:
            if item.then is not None:
                item.then()
        self._next_step = step + 1
        if not to_save:
            self._is_saving = False
        elif not self._is_saving:
            # Until the log is short again, it is said once: a save that is under way would be repeated.
            self._is_saving = True
            self._save(to_save)

    def _fail(self, cause: sqlite3.Error) -> None:
        logger.error("the journal cannot be written: %s", cause)
        error = _error_for_clients(cause)
        # What was given meanwhile is about jobs that end now, or lacks what was given before.
        with self._changed:
            self._pending = []
            self._has_failed = False
            self._is_saving = False
        for future in self._flushes:
            if not future.done():
                future.set_exception(error)
        if self._until_room is None:
            self._until_room = self._loop.create_task(self._wait_for_room())
            self._until_room.add_done_callback(raise_failure)
            self._on_writable(False)
        self._on_failure(error)

    async def _wait_for_room(self) -> None:
        assert self._file is not None, "a journal without a file never fails"
        has_room = False
        while not has_room:
            await asyncio.sleep(LOOK_FOR_ROOM_S)
            has_room = await asyncio.to_thread(self._file.has_room)
        self._until_room = None
        self._on_writable(True)

    def _set_writable(self) -> None:
        if self._until_room is not None:
            self._until_room.cancel()
            self._until_room = None
            self._on_writable(True)


class _Item(NamedTuple):
    change: Change | None = None
    rows: bytes | None = None
    then: Callable[[], None] | None = None


def _error_for_clients(cause: sqlite3.Error) -> SlipstreamError:
    if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        message = "the disk that the journal of jobs is on is full"
        return ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
    return UnavailableError(f"the journal of jobs cannot be written: {cause}")


class JobJournal(Journal):
    """The journal of a manager's jobs. Belongs to the event loop. Without a file, nothing is kept."""

    def __init__(
        self,
        file: JournalFile | None,
        *,
        jobs: Callable[[], Iterable[Job]],
        metrics: RequestMetrics,
        on_failure: Callable[[SlipstreamError], None],
        on_writable: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`jobs` returns all that are kept; `on_failure` must end all that are alive: see `Journal`."""
        self._jobs = jobs
        self._stored = [] if file is None else list(file.jobs())
        self._rows = [] if file is None else list(file.rows())
        self._is_on = file is not None
        super().__init__(file, on_failure=on_failure, on_writable=on_writable, save=self._save_all)
        self.last_number = 0 if file is None else file.last_number
        """The largest number that a job ever had."""
        self._metrics = metrics
        damage = Damage() if file is None else file.damage
        self._lacks_output = damage.lacks_output
        metrics.lost_output.inc(damage.lacks_output)
        for number, record in damage.jobs:
            self._count_lost(number, record, "its rows in the journal are damaged, and are left out")

    @property
    def has_jobs(self) -> bool:
        """True until its jobs are restored."""
        return bool(self._stored)

    def accept(self, job: Job) -> None:
        """Keeps a new job with the output that it has, or what has changed of it but for its output."""
        if self._is_on:
            self.accepted(job.number, record_of(job), output_of(job) if job.num_tokens else None)

    def take_in(self, step: StepOutput, running: Mapping[int, Sample], then: Callable[[], None]) -> None:
        """Keeps the output of a step, and calls `then` when that is done. `running`: samples by sequence ids."""
        if not self._is_on:
            then()
            return
        begun = {*step.admitted, *step.cached_tokens}
        ids = (*step.sequences, *begun) if begun else step.sequences
        keys = {number: running[number].key for number in ids if number in running}
        self.outputs(rows_of(step, keys), then)

    def save(self, job: Job) -> None:
        """Keeps the whole output of a job that still goes on, or that has ended."""
        if self._is_on:
            self.saved(job.number, output_of(job), time.time_ns() if job.is_over else None)

    async def restore(self, model: ServedModel) -> list[tuple[Job, int]]:
        """Returns each job, the earliest first, with a number that orders those that are over by their ends.

        Jobs of another model are dropped: their tokens cannot become text.
        """
        restored: list[tuple[StoredJob, Job]] = []
        num_dropped = 0
        for count, stored in enumerate(tuple(self._stored), start=1):
            if count % _RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                job = job_of(stored, model, lacks_output=self._lacks_output and stored.ended_ns is None)
            except Exception as error:
                self._count_lost(stored.number, stored.record, "its rows stay in the journal", error)
                self._stored.remove(stored)
                continue
            if job is None:
                num_dropped += 1
                self.forget(stored.number)
            else:
                restored.append((stored, job))
        unfinished = [(stored, job) for stored, job in restored if stored.ended_ns is None]
        if not await self._add_rows(unfinished):
            self._lacks_output = True
            return await self.restore(model)
        for _, job in unfinished:
            has_abort = any(sample.finish_reason is FinishReason.ABORT for sample in job.samples)
            if has_abort and not job.is_cancelled and job.left_as is None:
                # Its last caller had left, and the output was kept before that was.
                job.left_as = DISCONNECTED
            if job.is_cancelled or job.left_as is not None or job.error is not None:
                for sample in job.samples:
                    sample.end(FinishReason.ABORT)
        for _, job in restored:
            job.settle()
        for _, job in unfinished:
            if self._lacks_output:
                self.accept(job)
            self.save(job)
        if num_dropped:
            logger.warning("%d jobs of another model than the one that is served are dropped", num_dropped)
        self._stored, self._rows = [], []
        return [(job, self._next_step if stored.ended_ns is None else stored.since) for stored, job in restored]

    async def _add_rows(self, unfinished: Iterable[tuple[StoredJob, Job]]) -> bool:
        """Adds the output of the steps since each job was saved.

        Returns False if it cannot be read from a step on: the jobs are to be made again, it is left out from there on.
        """
        waiting = sorted(unfinished, key=lambda item: item[0].since, reverse=True)
        jobs: dict[int, Job] = {}
        for index, (number, rows) in enumerate(self._rows):
            while waiting and waiting[-1][0].since <= number:
                stored, job = waiting.pop()
                jobs[stored.number] = job
            if number % _RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                for row in rows if jobs else ():
                    add_rows(row, jobs)
            except Exception:
                logger.exception("the output of step %d cannot be read: it is made again, with all after it", number)
                self._metrics.lost_output.inc()
                del self._rows[index:]
                return False
        return True

    def _count_lost(self, number: int, record: bytes, what: str, cause: Exception | None = None) -> None:
        logger.error("job %d is lost: %s", number, what, exc_info=cause, extra={"job": job_id_of(record)})
        self._metrics.lost_jobs.inc()

    def _save_all(self, numbers: Sequence[int]) -> None:
        """Called when the log takes too much room."""
        jobs = {job.number: job for job in self._jobs()}
        for number in numbers:
            if number in jobs:
                self.save(jobs[number])
            else:
                self.forget(number)


def record_of(job: Job) -> bytes:
    """Encodes the request of a job, and the facts about it that change without output."""
    request = job.request
    return journal_pb2.JournaledJob(
        first=request.samples[0].to_pb(0, 0),
        num_samples=len(request.samples),
        stop=request.stop,
        min_new_tokens=request.min_new_tokens,
        continues_prompt=request.continues_prompt,
        shows_special=request.shows_special,
        digest=request.digest,
        attempt=job.attempt,
        created_ns=round(job.created_at.timestamp() * 1e9),
        is_detached=job.is_detached,
        is_cancelled=job.is_cancelled,
        model_identity=repr(job.model_identity),
        owner=job.owner,
    ).SerializeToString()


def output_of(job: Job) -> bytes:
    """Encodes the output of a job so far, and how it ended."""
    return journal_pb2.JournaledOutput(
        samples=[sample.to_journal(_unix_epoch_ns()) for sample in job.samples],
        failure=None if job.failure is None else Refusal(0, job.failure).to_pb(),
        left_as=job.left_as or "",
    ).SerializeToString()


def rows_of(step: StepOutput, keys: Mapping[int, int]) -> bytes:
    """Encodes the output of a step; `keys` names the sample of each sequence that counts."""
    unix_epoch_ns = _unix_epoch_ns()
    admitted = [
        (keys[sequence], at + unix_epoch_ns)
        for sequence, at in zip(step.admitted, step.admitted_ns, strict=True)
        if sequence in keys
    ]
    return (
        replace(
            step,
            sequences=[keys.get(sequence, 0) for sequence in step.sequences],
            admitted=[key for key, _ in admitted],
            admitted_ns=[at for _, at in admitted],
            published_ns=step.published_ns + unix_epoch_ns,
            logprobs={keys[sequence]: row for sequence, row in step.logprobs.items() if sequence in keys},
            cached_tokens={keys[sequence]: n for sequence, n in step.cached_tokens.items() if sequence in keys},
        )
        .to_pb()
        .SerializeToString()
    )


def job_of(stored: StoredJob, model: ServedModel, *, lacks_output: bool = False) -> Job | None:
    """Makes the job with the output that was saved with it; None if it is one of another model.

    `add_rows` adds the rest, then `Job.settle` must be called. `lacks_output`: clients may have had more output than it
    has; the rest is made again, which is another attempt.
    """
    record = journal_pb2.JournaledJob.FromString(stored.record)
    if record.model_identity != repr(model.identity):
        return None
    first = SequenceSpec.from_pb(record.first)
    request = CheckedRequest(
        job_id=first.job_id,
        digest=record.digest,
        samples=samples_of(first, record.num_samples),
        stop=tuple(record.stop),
        min_new_tokens=record.min_new_tokens,
        continues_prompt=record.continues_prompt,
        shows_special=record.shows_special,
    )
    job = Job(
        request,
        model,
        number=stored.number,
        attempt=record.attempt + lacks_output,
        created_at=datetime.fromtimestamp(record.created_ns / 1e9, UTC),
        arrived_at=_to_monotonic(record.created_ns) / 1e9,
        owner=record.owner,
    )
    output = journal_pb2.JournaledOutput.FromString(stored.output or b"")
    for sample, message in zip(job.samples, output.samples, strict=bool(output.samples)):
        sample.restore(message, _unix_epoch_ns())
    job.is_detached, job.is_cancelled = record.is_detached, record.is_cancelled
    job.left_as = output.left_as or None
    job.failure = Refusal.from_pb(output.failure).error if output.HasField("failure") else None
    return job


def job_id_of(record: bytes) -> str:
    """Returns the id of a job by its record, damaged or not, of which it is the beginning."""
    found = _ID_LENGTH.match(record)
    job_id = record[found.end() :][: found[1][0]].decode(errors="replace") if found is not None else ""
    return job_id if job_id.isprintable() and job_id else "unknown"


def add_rows(row: bytes, jobs: Mapping[int, Job]) -> None:
    """Adds the output of a step to those of these jobs that take part in it."""
    step = StepOutput.from_pb(scheduler_pb2.StepOutput.FromString(row))
    for key, admitted_ns in zip(step.admitted, step.admitted_ns, strict=True):
        if (sample := _sample(jobs, key)) is not None and sample.admitted_at is None:
            sample.admitted_at = _to_monotonic(admitted_ns) / 1e9
    for key, num_tokens in step.cached_tokens.items():
        if (sample := _sample(jobs, key)) is not None and not sample.num_new_tokens:
            sample.cached_tokens = num_tokens
    end, published_ns = 0, _to_monotonic(step.published_ns)
    columns = (step.sequences, step.num_tokens, step.num_accepted, step.finish_reasons)
    is_beyond = step.is_beyond_draft or [False] * len(step.sequences)
    for key, num_tokens, num_accepted, reason, is_beyond_draft in zip(*columns, is_beyond, strict=True):
        start, end = end, end + num_tokens
        if (sample := _sample(jobs, key)) is not None:
            with sample.failing_alone():
                sample.add(
                    step.tokens[start:end],
                    num_accepted,
                    step.logprobs.get(key, ()),
                    reason,
                    num_draft_tokens=step.num_draft_tokens,
                    published_ns=published_ns,
                    is_beyond_draft=is_beyond_draft,
                )


def _sample(jobs: Mapping[int, Job], key: int) -> Sample | None:
    job = jobs.get(key // MAX_SAMPLES)
    return None if job is None else job.samples[key % MAX_SAMPLES]


def _to_monotonic(unix_ns: int) -> int:
    """Returns the time of `time.monotonic_ns`: negative for one before the boot, and never in the future."""
    return min(unix_ns - _unix_epoch_ns(), time.monotonic_ns())


def _unix_epoch_ns() -> int:
    """Returns the nanoseconds since 1970, as the clock is set now, less those of `time.monotonic_ns`."""
    return time.time_ns() - time.monotonic_ns()
