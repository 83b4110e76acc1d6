"""An attachment of a draft: its link, and the memory between it and verify."""

from __future__ import annotations

import enum
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.errors import FailedPreconditionError, MismatchError, SlipstreamError
from slipstream.common.host import pid_namespace, shm_device
from slipstream.common.wire.layout import GIVEN_FENCES, OWN_FENCES, BufferName
from slipstream.common.wire.manifest import EVENT
from slipstream.common.wire.step import DRAFT_FENCES, FenceName, Role
from slipstream.common.wire.worker import Attachment, DraftSizes, OfferedRegion
from slipstream.scheduler.records import NO_LIMIT, DraftKV, DraftTraits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slipstream.common.device.interface import Arena, Device, Fence
    from slipstream.common.wire.events import EventLog
    from slipstream.common.wire.layout import DraftShape
    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import StepCost, WorkerDescription
    from slipstream.scheduler.link import Link

MOST_RETIRED = 2
"""Processes whose end attachments may wait for; then no further draft is attached."""
MOST_OF_ONE = 16
"""Attachments that may wait for the end of the same process; then it has to be started again."""


class Mapping(enum.Enum):
    """What is known of a draft's mapping of the memory."""

    NONE = "none"
    """It was not asked for."""
    ASKED = "asked"
    """The process may have it."""
    TAKEN = "taken"
    """The process has it, and so has released all earlier ones."""
    RELEASED = "released"
    """The process has finished its work, or was attached anew; on a GPU its word is no proof."""


class DraftAttachment:
    """One draft service attached beside an epoch, with a number and memory of its own."""

    def __init__(
        self,
        number: int,
        link: Link,
        description: WorkerDescription,
        shape: DraftShape,
        device: Device,
        *,
        epoch: int,
        log: EventLog,
    ) -> None:
        """Takes the memory. `number`: above those that draft has seen, and new to verify."""
        self.number = number
        self.link = link
        self.description = description
        self.shape = shape
        self.num_draft_tokens = shape.num_draft_tokens
        """K."""
        reads_hidden = shape.hidden_width > 0
        self.traits = DraftTraits(is_present=True, reads_hidden=reads_hidden, row_tokens=description.row_tokens)
        self.kv = DraftKV(
            number,
            is_paged=description.has_paged_kv,
            tokens_ahead=description.tokens_ahead or int(shape.hidden_width > 0),
            context_tokens=description.max_context_tokens or NO_LIMIT,
        )
        """The sequences and the shared pages that it can work with."""
        self.is_released = False
        """True once steps may have gone on without the tokens that they waited for."""
        self.costs: tuple[StepCost, ...] = ()
        """Times of its part of steps, as it measured them."""
        self._epoch = epoch
        self._log = log
        self._is_on_gpu = device.torch_device.type == "cuda"
        self._own: Arena = device.create_arena(shape.own_specs(), OWN_FENCES)
        try:
            self._given: Arena = device.create_arena(shape.given_specs(), GIVEN_FENCES)
        except BaseException:
            self._own.close()
            raise
        self.fences: dict[FenceName, Fence] = {name: self._own.fence(name) for name in DRAFT_FENCES}
        """The fences that draft signals."""
        self.stash: Fence = self._given.fence(FenceName.VERIFY_STASH)
        """On a GPU draft can write there, too."""
        self.stamps = self._own.tensor(BufferName.DRAFT_STAMPS)
        """[ring, 2, 2] int64, as draft wrote them: any numbers."""
        self._verify: Link | None = None
        """While it may know of this."""
        self._process = ProcessId.of(description.pid)
        self.mapping = Mapping.NONE

    def attach(self, common: Attachment, verify: Link, described_verify: WorkerDescription) -> None:
        """Attaches draft, then verify, which is at its steps meanwhile. `common`: verify's own attachment.

        Raises FailedPreconditionError (and its kinds) and UnavailableError.
        """
        own, given = self._own.manifest, self._given.manifest
        if not self.description.shared_weight_bytes:
            # On a GPU, memory that is lent can be written, too.
            described_verify = replace(described_verify, weights=None)
        self.mapping = Mapping.ASKED
        measured = self.link.attach(
            replace(
                common,
                epoch=self.number,
                manifest=own,
                given=given,
                shape=self.shape,
                peer=described_verify,
                expected_draft=None,
            )
        )
        self.costs = () if measured is None else measured.costs
        sizes = draft_sizes(self.description, self.num_draft_tokens)
        self.mapping, self._verify = Mapping.TAKEN, verify
        verify.attach_region(
            OfferedRegion(epoch=self._epoch, attachment=self.number, own=own, given=given, draft=sizes)
        )
        # All processes that need the memory have mapped it by now.
        self._own.seal()
        self._given.seal()

    def send(self, command: StepCommand) -> None:
        """Sends draft a command that waits for nothing. Raises the link's failure."""
        if self._log.is_enabled:
            self._log.send(Role.DRAFT, epoch=self.number, step=command.step)
        self.link.send(command)

    def release(self, step: int) -> None:
        """Ends verify's waits for draft, up to `step`. Draft's late writes may set the fences back.

        So verify is told as well, which on a CPU needs no word that draft can write.
        """
        if self._verify is not None and not self.is_released:
            self._verify.release_draft(self._epoch, self.number)
        self.is_released = True
        for name in DRAFT_FENCES if step else ():
            self.fences[name].release(step)
            if self._log.is_enabled:
                self._log.release(name, step, epoch=self._epoch, attachment=self.number)

    def release_draft(self, step: int) -> None:
        """Ends draft's waits for verify, up to `step`."""
        self.stash.release(step)
        if self._log.is_enabled:
            self._log.release(FenceName.VERIFY_STASH, step, epoch=self._epoch, attachment=self.number)

    def detach(self, verify: Link | None, *, drain: bool) -> None:
        """Ends the attachment on both sides; with `drain` draft finishes what it has. No step may refer to it.

        `verify`: None if its epoch is over.
        """
        if verify is not None and self._verify is not None:
            # A verify service that is lost has let it go as well.
            with suppress(SlipstreamError):
                verify.detach_draft(self._epoch, self.number)
        self._verify = None
        if self.link.detach(drain=drain):
            self.mapping = Mapping.RELEASED

    @property
    def is_gone(self) -> bool:
        """True if the memory can be given back, after `detach`.

        On a GPU that is once the process has ended: what it says of its mappings is no proof, and memory that it still
        writes to might be another process's by then. On a CPU a mapping keeps its own memory.
        """
        if self.mapping is Mapping.NONE or self._process.is_gone:
            return True
        return not self._is_on_gpu and self.mapping is Mapping.RELEASED

    def close(self) -> None:
        """Gives the memory back."""
        self._own.close()
        self._given.close()


class Retired:
    """Attachments that are over. Their memory is kept until draft is proven to write to it no more. Any thread."""

    def __init__(self) -> None:
        self._waiting: list[DraftAttachment] = []
        self._lock = threading.Lock()

    def add(self, attachment: DraftAttachment) -> None:
        """Takes an attachment that is detached on both sides."""
        with self._lock:
            self._supersede(attachment)
            self._waiting.append(attachment)
            self._free()

    def supersede(self, taken: DraftAttachment) -> None:
        """A process has taken an attachment, perhaps: it releases one before it takes another."""
        with self._lock:
            self._supersede(taken)
            self._free()

    def free(self) -> None:
        """Gives back the memory of attachments whose draft is gone."""
        with self._lock:
            self._free()

    def check(self, pid: int) -> None:
        """Checks that the draft with this process id may be attached.

        Raises FailedPreconditionError if MOST_RETIRED other processes may still write to their memory, or this one to
        that of MOST_OF_ONE attachments.
        """
        with self._lock:
            self._free()
            pids = [one.description.pid for one in self._waiting]
        if pids.count(pid) >= MOST_OF_ONE:
            raise FailedPreconditionError(f"attached {MOST_OF_ONE} times: the draft service has to be started again")
        if len(set(pids) - {pid}) >= MOST_RETIRED:
            raise FailedPreconditionError(f"{MOST_RETIRED} earlier draft processes may still write to their memory")

    def close(self) -> None:
        """Gives back everything, as the process ends."""
        with self._lock:
            for attachment in self._waiting:
                attachment.close()

    def _supersede(self, taken: DraftAttachment) -> None:
        for attachment in self._waiting:
            has_taken = taken.mapping in (Mapping.TAKEN, Mapping.RELEASED)
            if has_taken and attachment.description.pid == taken.description.pid:
                attachment.mapping = Mapping.RELEASED

    def _free(self) -> None:
        for attachment in [one for one in self._waiting if one.is_gone]:
            self._waiting.remove(attachment)
            attachment.close()


def draft_sizes(draft: WorkerDescription, num_draft_tokens: int) -> DraftSizes:
    """Returns the properties of a draft that verify's work depends on."""
    return DraftSizes(
        num_draft_tokens=num_draft_tokens, hidden_width=draft.hidden_width, hidden_layers=draft.hidden_layers
    )


class ProcessId:
    """A process of this host, told apart from a later one with the same number."""

    def __init__(self, pid: int, started: str | None) -> None:
        """Use `of`."""
        self._pid = pid
        self._started = started

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this number now."""
        return cls(pid, _started(pid))

    @property
    def is_gone(self) -> bool:
        """True if it has ended; a number that was no process of this host has."""
        return self._started is None or _started(self._pid) != self._started


def _started(pid: int) -> str | None:
    """The time at which a process was started, in ticks; None if there is none, or if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


def check_fits(device: Device, verify: WorkerDescription, draft: WorkerDescription) -> None:
    """Raises MismatchError naming each thing in which a draft does not fit verify, or cannot share memory."""
    verify.check_fits(draft)
    # Verify itself checks a draft that names the layers that it reads.
    if not draft.hidden_layers and draft.hidden_width not in (0, verify.hidden_width):
        widths = f"draft reads {draft.hidden_width}, verify writes {verify.hidden_width}"
        raise MismatchError([f"width of the hidden states: {widths}"])
    if draft.shared_weight_bytes and verify.weights is None:
        raise MismatchError(["weights: draft borrows verify's, which lends none (both need --share-weights)"])
    check_sharing(device, [draft])


def check_sharing(device: Device, workers: Iterable[WorkerDescription]) -> None:
    """Checks that workers speak this scheduler's contract, and can share the device's memory with it, before they do.

    A handle that is opened in another PID namespace fails with an error that names another cause; an event in another
    /dev/shm does not fail at all, its waiter waits for ever. Raises MismatchError naming each difference and a remedy.
    """
    workers = list(workers)
    for worker in workers:
        worker.check_version()
    differences = [text for worker in workers for text in _differences(device, worker)]
    if differences:
        raise MismatchError(differences)


def _differences(device: Device, worker: WorkerDescription) -> Iterator[str]:
    """Compares what both sides know."""
    name = worker.role.value
    if worker.device != device.identity:
        is_one_on_cpu = "cpu" in (worker.device, device.identity)
        remedy = "--device" if is_one_on_cpu else "CUDA_VISIBLE_DEVICES"
        found = f"device: scheduler has {device.identity!r}, {name} has {worker.device!r}"
        yield f"{found} (start all services with the same {remedy})"
        return
    if device.identity == "cpu":
        return
    own = pid_namespace()
    if own and worker.pid_namespace not in ("", own):
        yield (
            f"PID namespace: scheduler has {own}, {name} has {worker.pid_namespace}: CUDA shares memory within one "
            "(containers share one by `pid:` in compose, by shareProcessNamespace in Kubernetes)"
        )
    shm = shm_device()
    what_lies_there = ["results"] * (worker.role is Role.VERIFY) + ["event fences"] * (device.fence_kind == EVENT)
    if what_lies_there and shm and worker.shm_device not in (0, shm):
        yield (
            f"/dev/shm: scheduler has device {shm}, {name} has {worker.shm_device}: {' and '.join(what_lies_there)} "
            "lie there (containers share it by `ipc:` in compose, by one volume in Kubernetes)"
        )
