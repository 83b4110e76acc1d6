"""Drafts come, catch up, go and write anything beside a running verify: its tokens are those of plain decoding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.cpu.fence import HostFence
from slipstream.common.device.interface import Device
from slipstream.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    MismatchError,
    StaleEpochError,
)
from slipstream.common.wire.layout import BufferName, DraftShape
from slipstream.common.wire.sequence import SamplingParams
from slipstream.common.wire.step import FenceName, FenceOps, FencePoint, FenceWait, PrefillChunk, StepCommand
from slipstream.common.wire.worker import DraftSizes
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker import epoch, fused_future_map
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from slipstream.services.worker.fused_future_map import FusedFutureMap, FusedMasks, FusedRegion
from slipstream.services.worker.graphs import HostCapture
from tests.harness.checkpoints import write_checkpoint
from tests.harness.driven_workers import EPOCH, SIZES, Draft, Driven
from tests.harness.eagle3_checkpoints import ALGORITHMS, AUTHORS, MODULES, write_head
from tests.harness.inline_device import InlineDevice
from tests.harness.kernel_launches import KernelLaunches
from tests.harness.served_worker import kv_cache
from tests.harness.workers import SharedArenas

pytestmark = pytest.mark.sampled_module(13)

PROMPTS = {1: [5, 6, 7, 8, 9, 10, 11, 12, 13], 3: [200, 3, 77]}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7)


@pytest.fixture(params=["streams with threads", "graphs", "graphs with a GPU's kernels"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """One for each way to carry out a step."""
    if request.param == "streams with threads":
        return HostDevice()
    if request.param != "graphs":
        monkeypatch.setattr(epoch, "_classes", lambda device: (FusedFutureMap, FusedRegion, FusedMasks))
    return InlineDevice()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=5)


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    """A random head for it."""
    return write_head(target.with_name("head"))


@pytest.fixture(scope="module")
def reference(target: Path) -> dict[int, list[int]]:
    """The first sequence and the other one, decoded plainly."""
    driven = Driven(_verify(target, HostDevice()), HostDevice())
    driven.prefill(PROMPTS, SAMPLED)
    for _ in range(60):
        driven.plain()
    driven.close()
    assert len(set(driven.tokens[1])) > 20, "it does not repeat itself"
    return driven.tokens


def _verify(target: Path, device: Device) -> RoleEngine:
    return make_verify(WorkerConfig(model=target), device, 0)


def _twin(target: Path, device: Device) -> RoleEngine:
    """A draft that is the target itself: every guess is right if it knows all that the target knows."""
    return make_draft(WorkerConfig(model=target), device, 0)


def _head(head: Path, target: Path, device: Device, algorithm: str = EAGLE3) -> RoleEngine:
    return make_draft(WorkerConfig(model=head, target=target, algorithm=algorithm), device, 0)


def check(driven: Driven, reference: dict[int, list[int]]) -> None:
    """All that was decoded is what plain decoding gives."""
    for slot, tokens in driven.tokens.items():
        assert tokens == reference[slot][: len(tokens)]


def undrafted(driven: Driven, draft: Draft) -> StepCommand:
    """The next step, for which the draft never drafts."""
    driven.step += 1
    points = tuple(FencePoint(name, driven.step) for name in (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH))
    return StepCommand(
        epoch=EPOCH,
        step=driven.step,
        slots=tuple(driven.tokens),
        num_draft_tokens=(draft.sizes.num_draft_tokens,) * len(driven.tokens),
        ops=FenceOps((FenceWait(FenceName.DRAFT_PROPOSED, driven.step),), points),
        attachment=draft.number,
    )


def test_a_language_model_that_catches_up_guesses_as_if_it_had_been_there(
    target: Path, reference: dict[int, list[int]], device: Device
) -> None:
    driven = Driven(_verify(target, device), device)
    driven.prefill(PROMPTS, SAMPLED)
    for _ in range(5):
        driven.plain()
    draft = driven.make_draft(_twin(target, device), number=7)
    driven.catch_up(draft)
    for _ in range(6):
        driven.decode(draft)
    assert driven.num_accepted == [2] * 12
    check(driven, reference)
    driven.close()


def test_drafts_of_other_algorithms_and_lengths_take_turns(
    target: Path, head: Path, reference: dict[int, list[int]], device: Device
) -> None:
    expected = DraftSizes(num_draft_tokens=2)
    driven = Driven(_verify(target, device), device, expected=expected)
    first = driven.make_draft(_twin(target, device), number=2)
    driven.prefill(PROMPTS, SAMPLED, first)
    for _ in range(3):
        driven.decode(first)
    second = driven.make_draft(_head(head, target, device), number=3, num_draft_tokens=3)
    driven.decode(first)
    driven.decode(second, driven.join_with_history(second))
    driven.verify.detach_draft(EPOCH, first.number)
    for _ in range(3):
        driven.decode(second)
    driven.verify.detach_draft(EPOCH, second.number)
    driven.plain()
    third = driven.make_draft(_twin(target, device), number=9, num_draft_tokens=4)
    driven.catch_up(third)
    num_before = len(driven.num_accepted)
    driven.decode(third)
    assert driven.num_accepted[num_before:] == [4, 4]
    check(driven, reference)
    driven.close()


def _sizes(role: RoleEngine) -> DraftSizes:
    found = role.description
    return DraftSizes(num_draft_tokens=2, hidden_width=found.hidden_width, hidden_layers=found.hidden_layers)


@pytest.mark.parametrize("kind", ["language model", "head"])
@pytest.mark.parametrize("is_expected", [False, True])
def test_verify_captures_nothing_again_for_a_draft_that_it_expected(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *, is_expected: bool
) -> None:
    captured: list[object] = []
    capture = HostCapture.capture

    def counting(self: HostCapture, work: Callable[[], None]) -> Callable[[], None]:
        captured.append(work)
        return capture(self, work)

    monkeypatch.setattr(HostCapture, "capture", counting)
    device = InlineDevice()
    role = _twin(target, device) if kind == "language model" else _head(head, target, device)
    driven = Driven(_verify(target, device), device, expected=_sizes(role) if is_expected else None)
    num_of_verify = len(captured)
    draft = Draft(role, device, 2, 2)
    num_before = len(captured)
    driven.verify.attach_region(draft.memory.region(2, epoch=EPOCH, draft=draft.sizes))
    assert num_of_verify > 0
    assert (len(captured) == num_before) == is_expected
    draft.close()
    driven.close()


@pytest.mark.parametrize("expected", [None, "language model", "head"])
def test_drafts_find_what_verify_does_for_them_compiled(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, expected: str | None
) -> None:
    """A compiler would hold up the sequences that run when one comes."""
    monkeypatch.setattr(epoch, "_classes", lambda device: (FusedFutureMap, FusedRegion, FusedMasks))
    monkeypatch.setattr(fused_future_map, "_has_stamp", lambda place: place is not None)
    names = ("copy_in_kernel", "stash_kernel", "gather_kernel", "propose_kernel")
    kernels = {name: KernelLaunches(getattr(fused_future_map, name)) for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(fused_future_map, name, kernel)
    device = InlineDevice()
    roles = {"language model": _twin(target, device), "head": _head(head, target, device)}
    driven = Driven(_verify(target, device), device, expected=None if expected is None else _sizes(roles[expected]))
    of_verify = [kernels[name].variants for name in ("copy_in_kernel", "stash_kernel")]
    compiled = [variants.copy() for variants in of_verify]
    for number, role in enumerate(roles.values(), start=2):
        draft = driven.make_draft(role, number=number)
        driven.prefill(PROMPTS, SAMPLED, draft)
        driven.decode(draft)
        driven.plain(draft)
        driven.verify.detach_draft(EPOCH, number)
    driven.close()
    assert of_verify == compiled


@pytest.mark.parametrize("layout", [AUTHORS, MODULES])
def test_a_head_that_joins_late_looks_at_nothing_before(target: Path, layout: str) -> None:
    """Whatever is in its pages before `history_from` changes no guess; what is behind it does."""
    proposed = []
    head = write_head(target.with_name(layout), layout=layout)
    for canary in (0.0, 3.0, float("nan")):
        device, role = HostDevice(), _head(head, target, HostDevice(), ALGORITHMS[layout])
        driven = Driven(_verify(target, device), device)
        driven.prefill(PROMPTS, SAMPLED)
        driven.plain()
        draft = driven.make_draft(role, number=7)
        for pages in kv_cache(role).rows:
            pages.fill_(canary)
        driven.decode(draft, driven.join_with_history(draft))
        driven.decode(draft)
        proposed.append((draft.proposed(), driven.tokens))
        driven.close()
    assert proposed[0] == proposed[1] == proposed[2]


def test_a_draft_that_writes_everywhere_all_the_time_changes_no_token(
    target: Path, reference: dict[int, list[int]]
) -> None:
    device, stop = HostDevice(), threading.Event()
    driven = Driven(_verify(target, device), device)
    draft = driven.make_draft(_twin(target, device), number=2)
    rng = np.random.default_rng(5)
    mapped = [np.frombuffer(arena._memory, np.uint8) for arena in (draft.memory.own, draft.memory.given)]

    def scribble() -> None:
        while not stop.is_set():
            for view in mapped:
                view[64:] = rng.integers(0, 256, len(view) - 64, np.uint8)  # words apart: this draft lets verify go on

    driven.prefill(PROMPTS, SAMPLED, draft)
    writer = threading.Thread(target=scribble)
    writer.start()
    for _ in range(30):
        if any(len(tokens) + 3 > len(reference[slot]) for slot, tokens in driven.tokens.items()):
            break  # where the writer gets little time, most guesses are right
        driven.decode(draft)
    stop.set()
    writer.join()
    mapped.clear()
    check(driven, reference)
    driven.close()


def test_a_draft_that_is_lost_in_a_step_is_given_up_and_the_step_yields(
    target: Path, reference: dict[int, list[int]]
) -> None:
    device = HostDevice()
    driven = Driven(_verify(target, device), device)
    draft = driven.make_draft(_twin(target, device), number=2)
    driven.prefill(PROMPTS, SAMPLED, draft)
    driven.decode(draft)
    lost = undrafted(driven, draft)
    driven.verify.send(lost)
    driven.verify.detach_draft(EPOCH, draft.number)
    driven._take_in(lost.slots)
    with pytest.raises(FailedPreconditionError, match="attachment 2 is not there"):
        driven.verify.send(replace(lost, step=lost.step + 1))
    driven.verify.detach_draft(EPOCH, draft.number)
    for _ in range(5):
        driven.plain()
    check(driven, reference)
    driven.close()


def test_a_lost_draft_that_holds_its_word_at_zero_holds_no_step(target: Path, reference: dict[int, list[int]]) -> None:
    """Neither the step that waits when it is released nor one that comes later, on its way to verify by then."""
    device, stop = HostDevice(), threading.Event()
    driven = Driven(_verify(target, device), device)
    draft = driven.make_draft(_twin(target, device), number=2)
    driven.prefill(PROMPTS, SAMPLED, draft)
    driven.decode(draft)
    word = cast("HostFence", draft.memory.fence(FenceName.DRAFT_PROPOSED))._word

    def hold() -> None:
        while not stop.is_set():
            word.value = 0

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        for is_waiting in (True, False):
            lost = undrafted(driven, draft)
            driven.verify.send(lost)
            if is_waiting:
                with pytest.raises(DeadlineExceededError):
                    driven.verify.stream.synchronize(0.1)
                driven.verify.release_draft(EPOCH, draft.number)
            driven._take_in(lost.slots)
        driven.verify.release_draft(EPOCH, 99)
        driven.verify.release_draft(99, draft.number)
    finally:
        stop.set()
        holding.join()
    driven.verify.detach_draft(EPOCH, draft.number)
    driven.plain()
    check(driven, reference)
    driven.close()


def test_steps_go_on_while_a_draft_is_detached(target: Path) -> None:
    """Its memory is closed behind the last step that uses it, and no step waits for that."""
    device = HostDevice()
    driven = Driven(_verify(target, device), device)
    draft = driven.make_draft(_twin(target, device), number=2)
    driven.prefill(PROMPTS, SAMPLED, draft)
    held = threading.Event()
    driven.verify.stream.enqueue(lambda: held.wait() and None)
    pieces = driven.verify.engine.detach_draft(EPOCH, draft.number)
    next(pieces)
    next(pieces)
    held.set()
    driven.plain()
    assert list(pieces) == []
    driven.close()


def test_the_number_of_one_draft_does_not_bind_the_next(target: Path) -> None:
    device = HostDevice()
    driven = Driven(_verify(target, device), device)
    driven.prefill(PROMPTS)
    for number in (2**62, 2):
        driven.make_draft(_twin(target, device), number=number)
    driven.plain()
    driven.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"epoch": 2}, FailedPreconditionError, "epoch 2 is not open"),
        ({"attachment": EPOCH}, StaleEpochError, "attachment 1: there was an epoch or attachment of this number"),
        ({"attachment": 2}, StaleEpochError, "attachment 2: there was an epoch or attachment of this number"),
        ({"draft": DraftSizes(num_draft_tokens=9)}, MismatchError, "draft has 9, this epoch has room for 1 to 4"),
        ({"draft": DraftSizes(num_draft_tokens=2, hidden_width=5)}, MismatchError, "memory has 0, draft reads 5"),
    ],
)
def test_a_region_that_does_not_fit_is_refused_and_the_epoch_goes_on(
    target: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    device = HostDevice()
    driven = Driven(_verify(target, device), device)
    driven.prefill(PROMPTS)
    draft = driven.make_draft(_twin(target, device), number=2)
    region = replace(draft.memory.region(3, epoch=EPOCH, draft=draft.sizes), **changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        driven.verify.attach_region(region)
    driven.plain(draft)
    driven.close()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (DraftSizes(num_draft_tokens=2, hidden_width=64, hidden_layers=(99,)), "layers to fuse: draft asks for"),
        (DraftSizes(num_draft_tokens=2, hidden_width=64, hidden_layers=(0, 1)), "width of the hidden states"),
    ],
)
def test_a_draft_that_reads_what_verify_does_not_have(target: Path, sizes: DraftSizes, message: str) -> None:
    """As the one that is expected it costs its graphs; attached, it is refused."""
    device = InlineDevice()
    driven = Driven(_verify(target, device), device, expected=sizes)
    memory = SharedArenas(DraftShape(**SIZES, num_draft_tokens=2, hidden_width=sizes.hidden_width))
    with pytest.raises(MismatchError, match=message):
        driven.verify.attach_region(memory.region(2, epoch=EPOCH, draft=sizes))
    memory.close()
    driven.prefill(PROMPTS)
    driven.plain()
    driven.close()


def test_drafting_needs_an_attachment_and_catching_up_a_draft(target: Path, head: Path) -> None:
    device = HostDevice()
    driven = Driven(_verify(target, device), device)
    driven.prefill(PROMPTS)
    command = StepCommand(epoch=EPOCH, step=50, slots=(1,))
    for changes in ({"num_draft_tokens": (2,)}, {"catches_up": True}):
        with pytest.raises(InvalidArgumentError, match=r"num_draft_tokens|catches_up"):
            driven.verify.send(replace(command, **changes))
    draft = driven.make_draft(_head(head, target, device), number=2)
    chunk = PrefillChunk(slot=1, start=0, tokens=(1, 2), is_last=False)
    with pytest.raises(InvalidArgumentError, match="for a draft that reads hidden states"):
        draft.worker.send(replace(command, epoch=2, slots=(), catches_up=True, chunks=(chunk,)))
    # Slots that it is told of, and nothing to take in.
    draft.worker.send(replace(command, epoch=2, slots=(), catches_up=True))
    stash = FencePoint(FenceName.VERIFY_STASH, 50)
    with pytest.raises(InvalidArgumentError, match="fence: got 'VERIFY_STASH', accepted: one without an attachment"):
        driven.verify.send(replace(command, ops=FenceOps((), (stash,))))
    assert draft.memory.tensor(BufferName.NUM_NEW).sum() == 0
    driven.close()
