"""Calls in any order, and bytes that are no message: each gets its status, and the worker lives on."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.common.wire.worker import command_to_pb
from slipstream.protos import worker_pb2 as pb
from tests.harness.hosted import (
    EPOCHS,
    FUZZ,
    NUM_SLOTS,
    REFUSALS,
    TIMEOUT_S,
    GuardedMemory,
    Hosted,
    decode,
    error_of,
    send_bytes,
)

pytestmark = pytest.mark.timeout(120)

ACTIONS = ("attach", "again", "join", "part", "begin", "step", "drain", "all", "end", "leave")


def test_calls_in_any_order(hosted: Hosted) -> None:
    @FUZZ
    @given(actions=st.lists(st.sampled_from(ACTIONS)))
    def fuzz(actions: list[str]) -> None:
        hosted.worker.engine.last_epoch = 0
        with hosted.memory() as memory:
            for number in range(NUM_SLOTS * 4):
                memory.allow_step(decode(number, hosted.is_draft))
            caller = Caller(hosted, memory)
            for action in actions:
                caller.act(action)
            caller.act("leave")
            error_of(lambda: hosted.worker.stub.Drain(pb.DrainRequest(), timeout=TIMEOUT_S))
            hosted.worker.until_free()

    fuzz()
    hosted.worker.engine.last_epoch = 0
    hosted.check_it_works()


class Caller:
    """A scheduler that has lost its mind."""

    def __init__(self, hosted: Hosted, memory: GuardedMemory) -> None:
        self._stub = hosted.worker.stub
        self._request = hosted.attach_request(memory)
        self._region = hosted.region_request(memory, self._request.epoch)
        self._is_draft = hosted.is_draft
        self._step = 0
        self._outboxes: list[queue.SimpleQueue[pb.StepCommand | None]] = []
        self._calls: list[Any] = []

    def act(self, action: str) -> None:
        """Does one thing, on every stream that is open where it is about streams."""
        match action:
            case "attach":
                self._request.epoch = next(EPOCHS)
                error_of(lambda: self._stub.Attach(self._request, timeout=TIMEOUT_S))
            case "again":
                error_of(lambda: self._stub.Attach(self._request, timeout=TIMEOUT_S))
            case "join":
                self._region.epoch, self._region.attachment = self._request.epoch, next(EPOCHS)
                error_of(lambda: self._stub.AttachDraft(self._region, timeout=TIMEOUT_S))
            case "part":
                gone = pb.DetachDraftRequest(epoch=self._region.epoch, attachment=self._region.attachment)
                error_of(lambda: self._stub.DetachDraft(gone, timeout=TIMEOUT_S))
            case "begin":
                self._outboxes.append(queue.SimpleQueue())
                self._calls.append(self._stub.Execute(iter(self._outboxes[-1].get, None), timeout=TIMEOUT_S))
            case "step":
                self._step += 1
                attachment = 0 if self._is_draft else self._region.attachment
                step = decode(self._step, self._is_draft)
                command = replace(step, epoch=self._request.epoch, attachment=attachment)
                for outbox in self._outboxes:
                    outbox.put(command_to_pb(command))
            case "drain" | "all":
                epoch = 0 if action == "all" else self._request.epoch
                error_of(lambda: self._stub.Drain(pb.DrainRequest(epoch=epoch), timeout=TIMEOUT_S))
            case "end":
                self._close()
                for call in self._calls:
                    error_of(lambda call=call: list(call))  # type: ignore[misc]
                self._calls.clear()
            case _:
                for call in self._calls:
                    call.cancel()
                self._close()
                self._calls.clear()

    def _close(self) -> None:
        for outbox in self._outboxes:
            outbox.put(None)
        self._outboxes.clear()


def test_bytes_that_are_no_message_or_nearly_one(hosted: Hosted) -> None:
    @FUZZ
    @given(data=st.data())
    def fuzz(data: st.DataObject) -> None:
        is_message, error = send_bytes(data, hosted.worker.channel)
        # gRPC's own answer to bytes that are no message of the kind.
        accepted = REFUSALS if is_message else (*REFUSALS, grpc.StatusCode.UNKNOWN)
        assert error is None or error.code() in accepted, f"{error.code()}: {error.details()}"
        hosted.worker.until_free()

    fuzz()
    hosted.check_it_works()
