"""Drafts that describe themselves wrongly, fail to be attached, or are taken away while they catch up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import (
    ConfigError,
    FailedPreconditionError,
    MismatchError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.rpc.listener import Listener as SocketListener
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.layout import RESULT_FENCES, EpochShape
from slipstream.common.wire.server import DraftSwap, SwapTerms
from slipstream.common.wire.step import Role, RowTokens
from slipstream.common.wire.worker import Attachment, DeviceMemory, Measurements, StepTokens, WorkerDescription
from slipstream.scheduler import session
from slipstream.scheduler.attachment import DraftAttachment
from slipstream.scheduler.batch import Batch
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.draft import Draft, DraftState
from slipstream.scheduler.draft_session import DraftSession
from slipstream.scheduler.epoch import Epoch
from slipstream.scheduler.link import Link
from slipstream.scheduler.metrics import DraftMetrics
from slipstream.scheduler.observer import DecodeRecord
from slipstream.scheduler.records import DraftTarget, LossCause
from slipstream.scheduler.session import EpochNumbers, WorkerSession
from slipstream.scheduler.sizes import BatchSizes, EpochSizes, Workers
from slipstream.scheduler.waiting_queue import WaitingQueue
from tests.harness.waiting import block_until
from tests.harness.workers import describe

ADDRESS = "unix:/d"
CONFIG = SchedulerConfig(
    verify="unix:/v",
    draft=ADDRESS,
    slots=2,
    page_tokens=8,
    max_batched_tokens=16,
    fixed_draft_tokens=2,
    kv_memory_mib=8,
)
VERIFY = describe(Role.VERIFY)
NO_PROCESS = 2**22 + 1
"""Above every process id."""
DRAFT = describe(Role.DRAFT, pid=NO_PROCESS)


class FakeLink:
    """A link to a worker that takes everything, unless `error` is set."""

    failure = None
    has_refused = False

    def __init__(self, description: WorkerDescription, error: Exception | None = None) -> None:
        self.role = description.role
        self.description = description
        self.error = error
        self.answers = threading.Event()
        """Cleared, a description does not come."""
        self.answers.set()
        self.drains = threading.Event()
        """Cleared, it does not come to an end of its work."""
        self.drains.set()
        self.drain_timed_out = False
        self.num_detached = 0
        self.attachment: Attachment | None = None

    def describe(self) -> WorkerDescription:
        """See `Link.describe`."""
        if not self.answers.wait(20):
            raise UnavailableError("no answer")
        return self.description

    def attach(self, attachment: Attachment) -> None:
        """See `Link.attach`."""
        self.attachment = attachment

    def attach_region(self, _region: object) -> None:
        """See `Link.attach_region`."""
        if self.error is not None:
            raise self.error

    def release_draft(self, epoch: int, attachment: int) -> None:
        """See `Link.release_draft`."""

    def detach_draft(self, epoch: int, attachment: int) -> None:
        """See `Link.detach_draft`."""

    def detach(self, *, drain: bool) -> bool:
        """See `Link.detach`: breaks off one that drains."""
        self.num_detached += 1
        if not drain:
            self.drains.set()
        has_drained = drain and self.drains.wait(20)
        self.drain_timed_out |= drain and not has_drained
        return has_drained


class FakeSpeculation:
    """Never lets a draft take part, and lets it leave when it is withdrawn."""

    def __init__(self) -> None:
        self.session: DraftSession
        self.offered: list[Draft] = []

    def offer(self, draft: Draft) -> None:
        """See `Speculation.offer`."""
        self.offered.append(draft)
        draft.enter(DraftState.CATCHING_UP)

    def withdraw(self, draft: Draft, cause: LossCause) -> None:
        """See `Speculation.withdraw`."""
        draft.enter(DraftState.LEAVING)
        self.session.left(draft, cause, "it was taken away")
        draft.enter(DraftState.LEFT)
        self.session.gone(draft)


class Drafts:
    """A draft session and an epoch beside it."""

    def __init__(self, draft: FakeLink, verify: FakeLink | None = None, config: SchedulerConfig = CONFIG) -> None:
        device = HostDevice()
        self.numbers = EpochNumbers()
        self.session = DraftSession(
            config,
            device,
            make_link=lambda _: cast("Link", draft),
            next_number=self.numbers.of_attachment,
            metrics=DraftMetrics(CollectorRegistry()),
            wake=lambda: None,
        )
        self.speculation = FakeSpeculation()
        self.speculation.session = self.session
        sizes = EpochSizes.decide(CONFIG, Workers(verify=VERIFY, draft=None))
        shape = EpochShape(num_slots=3, run_ahead=1, num_draft_tokens=2, chunk_tokens=16)
        arena = device.create_arena(shape.specs(), RESULT_FENCES)
        attachment = Attachment(
            epoch=1,
            manifest=arena.manifest,
            shape=shape,
            page_tokens=8,
            num_pages=9,
            slot_pages=5,
            context_tokens=64,
        )
        arena.close()
        parts: dict[str, Any] = {"number": 1, "verify": VERIFY, "sizes": sizes, "attachment": attachment}
        parts |= {
            "speculation": self.speculation,
            "decodes": DecodeRecord(),
            "policy": None,
            "log": EventLog(),
            "measure": lambda: None,
            "_config": config,
        }
        epoch = SimpleNamespace(**parts, link=verify or FakeLink(VERIFY))
        epoch.sizes_of = partial(Epoch.sizes_of, epoch)
        self.epoch = cast("Epoch", epoch)

    def attach(self) -> None:
        """One try, in an epoch that is open."""
        self.session.enter(self.epoch, lambda: True)
        self.session.attach(self.epoch, DraftTarget(ADDRESS, 2))


@pytest.mark.parametrize(("name", "value"), [("last_epoch", 2**64 - 1), ("last_epoch", 2**62), ("tokens_ahead", 65)])
def test_a_draft_with_a_number_that_would_bind_others_is_refused(name: str, value: int) -> None:
    link = FakeLink(describe(Role.DRAFT, **{name: value}))
    drafts = Drafts(link)
    with pytest.raises(FailedPreconditionError, match=f"{name} of the draft service: got {value}, accepted: at most"):
        drafts.attach()
    assert drafts.numbers.of_attachment(0) == 1
    assert link.num_detached == 1


def test_a_draft_that_cannot_draft_as_many_tokens_as_each_step_is_to_have_is_refused() -> None:
    link = FakeLink(replace(DRAFT, max_draft_tokens=1))
    fixed, most = Drafts(link), Drafts(link, config=replace(CONFIG, fixed_draft_tokens=None, num_draft_tokens=2))
    for _ in range(2):
        with pytest.raises(MismatchError, match="fixed_draft_tokens: scheduler has 2, draft drafts at most 1"):
            fixed.attach()
    assert link.attachment is None
    most.attach()
    assert link.attachment.shape.num_draft_tokens == 1


def test_the_largest_number_that_a_draft_may_say_is_counted_on_from_for_it_alone() -> None:
    link = FakeLink(describe(Role.DRAFT, pid=NO_PROCESS, last_epoch=2**62 - 1))
    drafts = Drafts(link)
    drafts.attach()
    assert link.attachment is not None
    assert link.attachment.epoch == 2**62
    link.description = DRAFT  # another process, which was never attached
    drafts.attach()
    assert link.attachment.epoch == 1
    assert drafts.numbers.of_epoch(0) == 2


@pytest.mark.parametrize(("itl_target_ms", "pause_ns", "large_tokens"), [(None, 0, 80), (30, 30 * 10**6, None)])
def test_a_pause_that_is_asked_for_bounds_the_steps_of_a_crowd_too(
    itl_target_ms: int | None, pause_ns: int, large_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[BatchSizes]()
    bound = Batch.bound_shared_steps

    def record(batch: Batch, *args: Any, **options: Any) -> None:
        bound(batch, *args, **options)
        told.append(batch.sizes)

    class Measuring(FakeLink):
        def attach(self, attachment: Attachment) -> Measurements:  # type: ignore[override]
            super().attach(attachment)
            return Measurements(StepTokens(40))

    monkeypatch.setattr(Batch, "bound_shared_steps", record)
    verify = Measuring(replace(VERIFY, memory=DeviceMemory(total=2**34, free=2**34)))
    attachment = attach(replace(CONFIG, max_batched_tokens=None, itl_target_ms=itl_target_ms), verify, FakeLink(DRAFT))
    assert (attachment.longest_pause_ns, attachment.measures_step_tokens) == (pause_ns, True)
    assert [(sizes.mixed_tokens, sizes.large_chunk_tokens) for sizes in told] == [(40, large_tokens)]


@pytest.mark.parametrize("setting", [{"max_batched_tokens": 64}, {"debug": True, "max_batched_tokens": None}])
def test_a_pause_cannot_be_asked_for_where_no_step_is_measured(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="itl_target_ms: got 30, accepted: auto with --max-batched-tokens, --det"):
        replace(CONFIG, itl_target_ms=30, **setting)


def test_no_number_is_taken_twice() -> None:
    numbers = EpochNumbers()
    taken = [numbers.of_attachment(seen) for seen in (4, 4, 4, 0, 0, 0, 0, 0)]
    taken += [numbers.of_epoch(0), numbers.of_epoch(2), numbers.of_epoch(100), numbers.of_attachment(0)]
    assert len(set(taken)) == len(taken)
    assert all(number > 4 for number in taken[:3])
    assert taken[-4] < taken[-3] < taken[-2] < taken[-1]
    assert taken[-2:] == [101, 102]


@pytest.mark.parametrize("of_draft", [3, 4])
def test_memory_is_planned_without_a_draft_that_would_take_most_of_it(of_draft: int) -> None:
    """As many bytes a token as it says: a page takes four times what verify's takes, or five times."""
    bytes_per_token = of_draft * VERIFY.kv_bytes_per_token
    draft = FakeLink(describe(Role.DRAFT, kv_bytes_per_token=bytes_per_token))
    attachment = attach(replace(CONFIG, slots=1000), FakeLink(VERIFY), draft)
    assert (attachment.expected_draft is not None) == (of_draft == 3)


def test_a_try_that_begins_when_the_epoch_has_ended_asks_no_draft() -> None:
    link = FakeLink(DRAFT)
    link.answers.clear()
    drafts = Drafts(link)
    drafts.session.enter(drafts.epoch, lambda: True)
    drafts.session.leave()
    with pytest.raises(UnavailableError, match="verify was lost meanwhile"):
        drafts.session.attach(drafts.epoch, DraftTarget(ADDRESS, 2))
    assert link.num_detached == 1


def test_a_scheduler_that_starts_again_drafts_what_a_swap_has_chosen() -> None:
    config = replace(CONFIG, swapped_draft_tokens=1)
    assert config.draft_tokens(RowTokens.RAGGED) == 2, "another swap may choose more"
    assert Drafts(FakeLink(DRAFT), config=config).session.target == DraftTarget(ADDRESS, 1)
    with pytest.raises(ConfigError, match="swapped_draft_tokens: got 3, accepted: 1 to 2"):
        replace(CONFIG, swapped_draft_tokens=3)


def test_any_error_of_an_attachment_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    link, closed = FakeLink(DRAFT), []
    close = DraftAttachment.close
    monkeypatch.setattr(DraftAttachment, "close", lambda self: (closed.append(self.number), close(self)))
    with pytest.raises(ValueError, match="out of range"):
        Drafts(link, FakeLink(VERIFY, ValueError("out of range"))).attach()
    assert closed == [1]
    assert link.num_detached > 0


def test_no_draft_takes_away_one_that_catches_up() -> None:
    drafts = Drafts(FakeLink(DRAFT))
    session = drafts.session
    session.start()
    try:
        session.enter(drafts.epoch, lambda: False)
        assert session.status.state == "catching up"
        outcome = session.swap(DraftSwap(address="", terms=SwapTerms(judge_steps=0)))
        assert outcome.after.algorithm == "none"
        assert session.status.state == ""
        assert len(drafts.speculation.offered) == 1
    finally:
        session.leave()
        session.join()


def test_an_epoch_that_ends_breaks_off_the_drain_of_a_draft_that_hangs() -> None:
    link = FakeLink(DRAFT)
    drafts = Drafts(link)
    session = drafts.session
    session.start()
    try:
        session.enter(drafts.epoch, lambda: False)
        link.drains.clear()
        with ThreadPoolExecutor(1) as client:
            swapping = client.submit(session.swap, DraftSwap(address="", terms=SwapTerms(judge_steps=0)))
            block_until(lambda: link.num_detached > 0)
            session.leave()
            session.detach_all(0, drain=False)
            assert not link.drain_timed_out
            assert swapping.result().after.algorithm == "none"
    finally:
        session.leave()
        session.join()


def test_an_epoch_does_not_wait_for_a_draft_that_does_not_answer_when_it_is_to_end() -> None:
    link = FakeLink(DRAFT)
    link.answers.clear()
    drafts = Drafts(link)
    drafts.session.start()
    try:
        assert drafts.session.describe() is None
        drafts.session.enter(drafts.epoch, lambda: True)
        assert drafts.session.status.state == "missing"
    finally:
        drafts.session.leave()
        link.answers.set()
        drafts.session.join()


class Listener:
    """Implements `SessionListener`."""

    def __init__(self) -> None:
        self.is_attached = threading.Event()
        self.errors: list[SlipstreamError] = []

    def attached(self, _epoch: Epoch) -> None:
        """See `SessionListener.attached`."""
        self.is_attached.set()

    def detached(self, reason: str) -> None:
        """See `SessionListener.detached`."""

    def failed(self, error: SlipstreamError) -> None:
        """See `SessionListener.failed`."""
        self.errors.append(error)
        self.is_attached.set()


@pytest.mark.parametrize("wrong", [{"kv_bytes_per_token": 2**40}, {"dtype": "float16"}], ids=["too large", "misfit"])
def test_no_draft_ends_the_scheduler_as_the_memory_is_planned(wrong: dict[str, object]) -> None:
    attachment = attach(CONFIG, FakeLink(VERIFY), FakeLink(describe(Role.DRAFT, **wrong)))
    assert attachment.expected_draft is None


@pytest.mark.parametrize(
    ("is_on_gpu", "is_claimed", "is_waited_for"),
    [(True, False, True), (False, True, True), (True, True, True), (False, False, False)],
)
def test_the_first_epoch_waits_for_a_draft_that_is_loading(
    tmp_path: Path, is_on_gpu: bool, is_claimed: bool, is_waited_for: bool
) -> None:
    """On a GPU also for one of which there is no process yet: verify captures graphs for what it knows of."""
    size = 2**40 if is_on_gpu else 0
    verify = FakeLink(describe(Role.VERIFY, memory=DeviceMemory(total=size, free=size)))
    with ExitStack() as held:
        address = claimed(tmp_path, held) if is_claimed else ADDRESS
        attachment = attach(replace(CONFIG, draft=address), verify, LoadingLink(DRAFT))
    assert (attachment.expected_draft is not None) == is_waited_for


def test_an_epoch_waits_only_so_long_for_a_draft_that_is_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "DRAFT_LOADS_S", 0.5)
    draft = LoadingLink(DRAFT, needed=10**6)
    with ExitStack() as held:
        attachment = attach(replace(CONFIG, draft=claimed(tmp_path, held)), FakeLink(VERIFY), draft)
    assert attachment.expected_draft is None
    assert "is not there after" in caplog.text


def test_the_first_epoch_serves_once_the_draft_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones go on soon: sequences wait for them."""
    monkeypatch.setattr(session, "FIRST_TRY_S", 0.0)
    listener = Listener()

    class SlowLink(FakeLink):
        was_serving = True

        def attach(self, attachment: Attachment) -> None:
            self.was_serving = listener.is_attached.wait(1.0)

    draft = SlowLink(DRAFT)
    attach(CONFIG, FakeLink(VERIFY), draft, listener)
    assert not draft.was_serving


def claimed(folder: Path, held: ExitStack) -> str:
    """An address at which a process is going to serve."""
    folder.chmod(0o700)
    return held.enter_context(SocketListener.claim(f"unix:{folder}/draft.sock")).address


class LoadingLink(FakeLink):
    """A link to a draft that is there when it is asked for the third time, or as often as is needed."""

    def __init__(self, description: WorkerDescription, needed: int = 3) -> None:
        super().__init__(description)
        self.num_asked, self.needed = 0, needed

    def describe(self) -> WorkerDescription:
        """See `Link.describe`."""
        self.num_asked += 1
        if self.num_asked < self.needed:
            raise UnavailableError("it loads")
        return self.description


def attach(config: SchedulerConfig, verify: FakeLink, draft: FakeLink, listener: Listener | None = None) -> Attachment:
    """Runs a session until its first epoch is open; returns what verify is told of it."""
    links, queue, listener = {Role.VERIFY: verify, Role.DRAFT: draft}, WaitingQueue(8), listener or Listener()
    made = WorkerSession(
        config,
        HostDevice(),
        queue,
        registry=CollectorRegistry(),
        listener=listener,
        sink=lambda _: None,
        make_link=lambda role, _: cast("Link", links[role]),
    )
    made.start()
    assert listener.is_attached.wait(20)
    queue.stop()
    made.join()
    assert not listener.errors
    assert verify.attachment is not None
    return verify.attachment
