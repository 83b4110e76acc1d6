"""Gateways and a scheduler over real gRPC on a Unix socket."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.benchmarks.dummy_model import DummyDraft, DummyVerify
from slipstream.common.errors import (
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from slipstream.common.rpc.listener import Listener
from slipstream.common.rpc.metrics import LOOPBACK
from slipstream.common.rpc.status import error_from_rpc
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.server import SchedulerDescription, SwapOutcome
from slipstream.common.wire.step import Role
from slipstream.protos import scheduler_pb2 as pb
from slipstream.scheduler import service
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.server import run_scheduler
from slipstream.scheduler.service import MAX_QUEUED, GatewayStream, check_sequence
from slipstream.services.worker.engine import RoleEngine
from tests.harness.scheduler_server import Gateway, served_scheduler
from tests.harness.waiting import until
from tests.harness.workers import VOCAB_SIZE, describe

SPEC = SequenceSpec(
    job_id="job", prompt=(1, 2, 3), max_new_tokens=9, sampling=SamplingParams(), stop_token_ids=frozenset()
)
LONG = replace(SPEC, max_new_tokens=90)
ENDLESS = replace(SPEC, max_new_tokens=2**14 - 10)
"""It outlasts what a test does beside it, on a slow machine, too."""
ROOM: dict[str, Any] = {"context_tokens": 2**14, "page_tokens": 64}
"""For ENDLESS."""


def dummies(length_ms: float = 0.0) -> tuple[RoleEngine, RoleEngine]:
    """Verify and draft with dummy kernels; the token at a position is 32 + position % 64."""
    verify, draft = (describe(role, max_context_tokens=2**14) for role in (Role.VERIFY, Role.DRAFT))
    return DummyVerify(verify, length_ms), DummyDraft(draft, length_ms)


def tokens_at(first: int, last: int) -> list[int]:
    """The dummies' tokens at these positions."""
    return [32 + position % 64 for position in range(first, last)]


async def test_sequences_run_and_their_output_comes_step_by_step(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(), fixed_draft_tokens=2) as served, Gateway(served) as gateway:
        await gateway.attached()
        other = replace(SPEC, prompt=(5,), max_new_tokens=4, max_draft_tokens=0)
        assert await gateway.run(SPEC, other) == [tokens_at(3, 12), tokens_at(1, 5)]
        assert gateway.ends == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
        assert [number for step in gateway.steps for number in step.admitted] == [1, 2]
        times = [step.published_ns for step in gateway.steps]
        assert times == sorted(times)
        assert min(when for step in gateway.steps for when in step.admitted_ns) <= times[0] <= time.monotonic_ns()
        assert {step.num_draft_tokens for step in gateway.steps} == {0, 2}


async def test_no_full_garbage_collection_holds_up_running_sequences(tmp_path: Path) -> None:
    """One stops all threads for tens of milliseconds. It comes when nothing runs."""
    automatic = gc.get_threshold()
    async with (
        served_scheduler(tmp_path, dummies(5.0)[0], **ROOM) as served,
        Gateway(served) as gateway,
    ):
        await gateway.attached()
        garbage: list[object] = []
        garbage.append(garbage)
        gc.collect()
        found = weakref.ref(anchor := _Anchor())
        garbage.append(anchor)
        gc.collect()  # both are of the oldest generation now
        (number,) = await gateway.submit(ENDLESS)
        await gateway.until(lambda: len(gateway.outputs[number]) > 2)
        del garbage, anchor
        # As many new objects as take Python to its next full collection.
        kept = [[[] for _ in range(automatic[0])] for _ in range(2 * automatic[1] * automatic[2])]
        # For longer than the time between two looks for what is idle.
        await gateway.until(lambda: len(gateway.outputs[number]) > 100)
        assert number not in gateway.ends
        assert found() is not None
        del kept
        await gateway.cancel(number)
        await gateway.until(lambda: number in gateway.ends)
        await until(lambda: found() is None)
    assert gc.get_threshold() == automatic


class _Anchor:
    """An object that tells when it is gone."""


async def test_a_sequence_with_output_goes_on_behind_it(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(), fixed_draft_tokens=2) as served, Gateway(served) as gateway:
        await gateway.attached()
        cut = replace(SPEC, output=tuple(tokens_at(3, 7)))
        assert await gateway.run(cut) == [tokens_at(7, 12)]


async def test_describe_says_what_is_served(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(), max_sequences=77) as served, Gateway(served) as gateway:
        await gateway.attached()
        message = await served.stub.Describe(pb.DescribeSchedulerRequest())
        description = SchedulerDescription.from_pb(message)
        assert description.max_sequences == 77
        told = gateway.states[-1].serving
        assert told is not None
        since = description.server.draft_state_seconds
        assert description == replace(told, server=replace(told.server, draft_state_seconds=since))
        assert (description.server.draft_state, description.server.algorithm) == ("attached", "standalone")
        assert (description.server.vocab_size, description.server.context_tokens) == (VOCAB_SIZE, 96)
        assert [service.name for service in description.server.services] == ["scheduler", "verify", "draft"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": (1, VOCAB_SIZE)}, "prompt"),
        ({"output": (VOCAB_SIZE,)}, "output"),
        ({"stop_token_ids": frozenset({VOCAB_SIZE})}, "stop_token_ids"),
        ({"max_new_tokens": 94}, "max_new_tokens"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),))}, "sampling_params.logit_bias"),
        (
            {"grammar": '{"grammars": []}'},
            "grammar: got 'a grammar', accepted: none: this server has no grammar worker",
        ),
    ],
)
async def test_a_sequence_that_makes_no_sense_is_refused_and_others_run(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    async with served_scheduler(tmp_path, *dummies()) as served, Gateway(served) as gateway:
        await gateway.attached()
        wrong, right = await gateway.submit(replace(SPEC, **change), SPEC)
        await gateway.until(lambda: right in gateway.ends)
        assert set(gateway.refused) == {wrong}
        assert isinstance(gateway.refused[wrong].error, InvalidArgumentError)
        assert field in str(gateway.refused[wrong].error)


async def test_ids_that_do_not_grow_end_the_stream(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies()) as served, Gateway(served) as gateway:
        await gateway.attached()
        for _ in range(2):
            await gateway.call.write(pb.RunRequest(sequences=[SPEC.to_pb(4, gateway.epoch)]))
        await gateway.until(lambda: gateway.error is not None)
        assert gateway.error is not None
        assert gateway.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "sequences[0].id" in gateway.error.details()


async def test_a_sequence_that_cannot_be_taken_in_is_refused_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_one(spec: SequenceSpec, serving: SchedulerDescription) -> None:
        if spec.job_id == "bad":
            raise RuntimeError("a mistake of ours")
        check_sequence(spec, serving)

    monkeypatch.setattr(service, "check_sequence", fail_one)
    async with served_scheduler(tmp_path, *dummies()) as served, Gateway(served) as gateway:
        await gateway.attached()
        before, bad, after = await gateway.submit(SPEC, replace(SPEC, job_id="bad"), SPEC)
        await gateway.until(lambda: len(gateway.ends) == 2)
        assert set(gateway.ends) == {before, after}
        assert isinstance(gateway.refused[bad].error, InternalError)


async def test_more_sequences_than_it_holds_are_refused(tmp_path: Path) -> None:
    roles = dummies(20.0)
    sizes = {**ROOM, "max_sequences": 3, "slots": 1}
    async with served_scheduler(tmp_path, *roles, **sizes) as served, Gateway(served) as gateway:
        await gateway.attached()
        ids = await gateway.submit(*[ENDLESS] * 4)
        await gateway.until(lambda: bool(gateway.refused))
        assert set(gateway.refused) == {ids[3]}
        assert isinstance(gateway.refused[ids[3]].error, ResourceExhaustedError)
        await gateway.cancel(*ids)
        await gateway.until(lambda: set(gateway.ends) == set(ids[:3]))
        assert await gateway.run(SPEC) == [tokens_at(3, 12)]


async def test_a_cancelled_sequence_ends_with_abort_and_a_second_cancel_does_nothing(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(5.0), slots=1, **ROOM) as served, Gateway(served) as gateway:
        await gateway.attached()
        running, waiting = await gateway.submit(ENDLESS, ENDLESS)
        await gateway.until(lambda: len(gateway.outputs[running]) > 3)
        await gateway.cancel(waiting, running, 99)
        await gateway.until(lambda: len(gateway.ends) == 2)
        assert set(gateway.ends.values()) == {FinishReason.ABORT}
        await gateway.cancel(running)
        assert await gateway.run(SPEC) == [tokens_at(3, 12)]


async def test_a_gateway_that_is_gone_ends_its_sequences_and_no_others(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(3.0), slots=2, **ROOM) as served, Gateway(served) as stays:
        await stays.attached()
        async with Gateway(served) as leaves:
            await leaves.submit(*[ENDLESS] * 3)
            await leaves.until(lambda: len(leaves.outputs[1]) > 2)
            [own] = await stays.submit(LONG)
        # Both slots were taken by the other one: this runs as they are free again.
        await stays.until(lambda: own in stays.ends)
        assert stays.outputs[own] == tokens_at(3, 93)
        assert len(await stays.run(LONG, LONG)) == 2


async def test_two_gateways_get_their_own_tokens_though_their_ids_are_the_same(tmp_path: Path) -> None:
    async with (
        served_scheduler(tmp_path, *dummies(1.0), fixed_draft_tokens=2) as served,
        Gateway(served) as one,
        Gateway(served) as other,
    ):
        await one.attached()
        await other.attached()
        await one.submit(SPEC, replace(SPEC, prompt=(1,)))
        await other.submit(replace(SPEC, prompt=(1,) * 9), replace(SPEC, prompt=(1,) * 7))
        await one.until(lambda: len(one.ends) == 2)
        await other.until(lambda: len(other.ends) == 2)
        assert list(one.outputs.values()) == [tokens_at(3, 12), tokens_at(1, 10)]
        assert list(other.outputs.values()) == [tokens_at(9, 18), tokens_at(7, 16)]


async def test_priority_goes_before_arrival_and_arrival_before_submission(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(2.0), slots=1) as served, Gateway(served) as gateway:
        await gateway.attached()
        [first] = await gateway.submit(replace(ENDLESS, max_new_tokens=30))
        await gateway.until(lambda: bool(gateway.outputs[first]))
        late, early, urgent = await gateway.submit(
            replace(SPEC, arrival=20), replace(SPEC, arrival=10), replace(SPEC, arrival=30, priority=1)
        )
        await gateway.until(lambda: len(gateway.ends) == 4)
        admitted = [number for step in gateway.steps for number in step.admitted]
        assert admitted == [first, urgent, early, late]


async def test_a_sequence_that_waits_past_its_deadline_is_refused(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(2.0), slots=1, **ROOM) as served, Gateway(served) as gateway:
        await gateway.attached()
        [running] = await gateway.submit(ENDLESS)
        await gateway.until(lambda: bool(gateway.outputs[running]))
        [late] = await gateway.submit(replace(SPEC, deadline_ns=time.monotonic_ns() + 10_000_000))
        await gateway.until(lambda: late in gateway.refused)
        assert isinstance(gateway.refused[late].error, DeadlineExceededError)
        assert running not in gateway.ends, "it does not wait for a slot to be told"


async def test_a_lost_worker_pauses_and_the_next_epoch_takes_sequences_again(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(2.0), **ROOM) as served, Gateway(served) as gateway:
        await gateway.attached()
        old = gateway.epoch
        [lost] = await gateway.submit(ENDLESS)
        await gateway.until(lambda: len(gateway.outputs[lost]) > 3)
        served.workers[0].failure = UnavailableError("the verify service is lost: for a test")
        await gateway.until(lambda: gateway.states[-1].serving is None)
        assert "for a test" in gateway.states[-1].paused
        assert not gateway.states[-1].is_final
        with pytest.raises(grpc.RpcError) as refused:
            await served.stub.Describe(pb.DescribeSchedulerRequest())
        assert isinstance(error_from_rpc(refused.value), UnavailableError)
        served.workers[0].failure = None
        await gateway.attached()
        assert gateway.epoch > old
        # For the old epoch: dropped without an answer. It is submitted again with what it has.
        await gateway.submit(SPEC, epoch=old)
        have = tuple(gateway.outputs[lost])
        last = len(have) + 9
        resumed = replace(SPEC, output=have, max_new_tokens=last)
        assert await gateway.run(resumed) == [tokens_at(3 + len(have), 3 + last)]
        assert set(gateway.ends) == {3}
        assert gateway.refused == {}


async def test_a_verify_that_does_not_fit_is_final(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with served_scheduler(tmp_path, DummyVerify(describe(Role.VERIFY, device="GPU-1"), 0.0)) as served:
        assert await served.task == 1
    assert "device: scheduler has 'cpu', verify has 'GPU-1'" in capsys.readouterr().err


async def test_a_draft_that_does_not_fit_is_left_out_with_the_reason(tmp_path: Path) -> None:
    verify, _ = dummies()
    draft = DummyDraft(describe(Role.DRAFT, tokenizer_sha256="99"), 0.0)
    async with served_scheduler(tmp_path, verify, draft) as served, Gateway(served) as gateway:
        await gateway.attached()
        await gateway.run(SPEC)
        message = await served.stub.Describe(pb.DescribeSchedulerRequest())
        server = SchedulerDescription.from_pb(message).server
        assert (server.algorithm, server.draft_state) == ("none", "missing")
        assert "draft has '99'" in server.draft_problem
        with pytest.raises(grpc.aio.AioRpcError, match="tokenizer") as caught:
            await served.stub.SwapDraft(pb.SwapDraftRequest(address="unix:/none"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_swap_of_fields_that_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies()) as served, Gateway(served) as gateway:
        await gateway.attached()
        for request, field in (
            (pb.SwapDraftRequest(address="nowhere"), "address"),
            (pb.SwapDraftRequest(address="unix:/none", num_draft_tokens=99), "num_draft_tokens"),
            (pb.SwapDraftRequest(rollback_below=-1.0), "rollback_below"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
                await served.stub.SwapDraft(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        taken_away = SwapOutcome.from_pb(await served.stub.SwapDraft(pb.SwapDraftRequest(judge_steps=0)))
        assert (taken_away.before.algorithm, taken_away.after.algorithm) == ("standalone", "none")
        await gateway.run(SPEC)


async def test_the_end_of_the_scheduler_lets_sequences_end_first(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(2.0)) as served, Gateway(served) as gateway:
        await gateway.attached()
        [own] = await gateway.submit(LONG)
        await gateway.until(lambda: bool(gateway.outputs[own]))
        assert await served.stop() == 0
        await gateway.until(lambda: gateway.error is not None)
        assert gateway.outputs[own] == tokens_at(3, 93)
        assert gateway.states[-1].paused == "the scheduler is shutting down"
        assert isinstance(error_from_rpc(gateway.error), UnavailableError)


async def _unwritten(message: pb.RunResponse) -> None:
    pytest.fail("what was queued is dropped")


async def test_a_gateway_that_does_not_read_is_cut_off() -> None:
    stream = GatewayStream(1)
    for _ in range(MAX_QUEUED):
        stream.put(pb.RunResponse())
    assert not stream.is_over
    stream.put(pb.RunResponse())
    assert stream.is_over
    with pytest.raises(ResourceExhaustedError, match="unread"):
        await stream.send(_unwritten)


async def test_a_stream_ends_behind_what_is_queued() -> None:
    stream = GatewayStream(1)
    refusal = pb.Refusal(sequence=3)
    stream.put(pb.RunResponse(refusals=[refusal]))
    stream.end(None)
    stream.put(pb.RunResponse())
    written: list[pb.RunResponse] = []

    async def write(message: pb.RunResponse) -> None:
        written.append(message)

    await stream.send(write)
    assert [list(message.refusals) for message in written] == [[refusal]]


async def test_tcp_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"listen: got .*127\.0\.0\.1.*unix:PATH")
    with Listener.claim("127.0.0.1:0") as listener, refused:
        await run_scheduler(SchedulerConfig(verify="unix:/none"), listener, 0, LOOPBACK)


async def test_a_directory_of_logs_that_cannot_be_made_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = SchedulerConfig(verify="unix:/none", access_log_dir=tmp_path / "file" / "logs")
    refused = pytest.raises(ConfigError, match=r"access_log_dir: got .*, accepted: a directory .* \(Not a directory\)")
    with Listener.claim(f"unix:{tmp_path}/private/scheduler.sock") as listener, refused:
        await run_scheduler(config, listener, 0, LOOPBACK)
