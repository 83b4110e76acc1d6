"""When a grammar worker's attachments end: none is left over, whatever its callers do."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from slipstream.common.errors import StaleEpochError
from slipstream.common.wire.events import EventLog
from slipstream.common.wire.step import GRAMMAR_PROTOCOL_VERSION
from slipstream.protos import worker_pb2 as pb
from slipstream.services.grammar import server
from slipstream.services.grammar.server import GrammarServicer
from tests.harness.waiting import TIMEOUT_S, until


class StuckEpoch:
    """An attachment whose steps wait for what never happens."""

    made: list[StuckEpoch]

    def __init__(self, request: pb.AttachRequest, *_: Any, **__: Any) -> None:
        self.number = request.epoch
        self.is_finishing = False
        self.is_over = threading.Event()
        self.made.append(self)

    def finish(self) -> None:
        """Returns when it is abandoned."""
        self.is_finishing = True
        assert self.is_over.wait(TIMEOUT_S)

    def abandon(self) -> None:
        """Ends it."""
        self.is_over.set()


@pytest.fixture
def servicer(monkeypatch: pytest.MonkeyPatch) -> GrammarServicer:
    """One whose attachments are stuck, and whose tokenizers are none."""
    monkeypatch.setattr(StuckEpoch, "made", [], raising=False)
    monkeypatch.setattr(server, "GrammarEpoch", StuckEpoch)
    monkeypatch.setattr(server, "load_tokenizer", lambda *_: None)
    executor: Any = None
    return GrammarServicer(executor, CollectorRegistry(), 0, EventLog())


async def attach(servicer: GrammarServicer, epoch: int) -> None:
    """Attaches as a scheduler does."""
    context: Any = None
    request = pb.AttachRequest(protocol_version=GRAMMAR_PROTOCOL_VERSION, epoch=epoch, num_slots=2)
    await servicer.Attach(request, context)


async def test_a_drain_whose_caller_goes_away_leaves_no_thread(servicer: GrammarServicer) -> None:
    await attach(servicer, 1)
    context: Any = None
    draining = asyncio.create_task(servicer.Drain(pb.DrainRequest(epoch=1), context))
    (epoch,) = StuckEpoch.made
    await until(lambda: epoch.is_finishing)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert epoch.is_over.is_set()


async def test_an_attachment_during_another_one_ends_that(
    servicer: GrammarServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, may_load = [], threading.Event()

    def load(*_: object) -> None:
        loads.append(None)
        assert may_load.wait(TIMEOUT_S)

    monkeypatch.setattr(server, "load_tokenizer", load)
    both = [asyncio.create_task(attach(servicer, number)) for number in (1, 2)]
    await until(lambda: bool(loads))
    may_load.set()
    await asyncio.gather(*both)
    first, second = StuckEpoch.made
    assert (first.number, second.number) == (1, 2)
    assert (first.is_over.is_set(), second.is_over.is_set()) == (True, False)
    with pytest.raises(StaleEpochError):
        await attach(servicer, 2)
