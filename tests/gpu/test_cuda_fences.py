"""Both kinds of fences between streams of different processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from slipstream.common.wire.manifest import EVENTS
from slipstream.common.wire.step import FenceName
from tests.gpu.conftest import SPECS
from tests.harness.other_process import GpuUser, attached

if TYPE_CHECKING:
    from slipstream.common.device.cuda.arena import CudaArena
    from slipstream.common.device.cuda.device import CudaDevice
    from tests.harness.other_process import Pair

PROPOSED, PUBLISH, STASH, *_ = (int(name) for name in FenceName)


def seen(arena: CudaArena, device: CudaDevice, count: int) -> list[int]:
    """The first elements of what was copied."""
    values: list[int] = device.to_host([arena.tensor("seen")])[0].tolist()
    return values[:count]


def test_a_stream_waits_for_work_of_another_process(
    device_of_kind: CudaDevice, arena_of_kind: CudaArena, pair: Pair
) -> None:
    """More values than an event fence has events, and each seen with what was written before it."""
    rounds = 3 * EVENTS + 1
    producer, consumer = attached(pair, arena_of_kind)
    for value in range(1, rounds):
        producer.do("spin 300", f"fill lengths {value}", f"signal {PROPOSED} {value}")
        consumer.do(f"wait {PROPOSED} {value}", f"copy lengths {value}", f"signal {PUBLISH} {value}")
        producer.do(f"wait {PUBLISH} {value}")
    assert producer.ask("sync 10") == consumer.ask("sync 10") == "done"
    assert seen(arena_of_kind, device_of_kind, rounds) == list(range(rounds))
    assert [arena_of_kind.fence(name).poll() for name in FenceName] == [rounds - 1, rounds - 1, 0, 0, 0, 0]


def test_waits_may_be_enqueued_long_before_their_signals(device: CudaDevice, arena: CudaArena, pair: Pair) -> None:
    rounds = 200
    producer, consumer = attached(pair, arena)
    consumer.do(f"many {rounds} wait {PROPOSED} {{}}; copy lengths {{}}; signal {PUBLISH} {{}}")
    assert consumer.ask("sync 0.05") == "late"
    producer.do(f"many {rounds} fill lengths {{}}; signal {PROPOSED} {{}}; wait {PUBLISH} {{}}")
    assert producer.ask("sync 10") == consumer.ask("sync 10") == "done"
    assert seen(arena, device, rounds + 1) == list(range(rounds + 1))


def test_stamps_of_two_processes_interleave(device: CudaDevice, arena: CudaArena, pair: Pair) -> None:
    """The clock is one for all processes."""
    one, two = attached(pair, arena)
    for number in range(50):
        one.do(f"wait {STASH} {number}", f"stamp {4 * number}", "spin 20", f"stamp {4 * number + 1}")
        one.do(f"signal {PROPOSED} {number + 1}")
        two.do(f"wait {PROPOSED} {number + 1}", f"stamp {4 * number + 2}", "spin 20", f"stamp {4 * number + 3}")
        two.do(f"signal {STASH} {number + 1}")
    assert one.ask("sync 10") == two.ask("sync 10") == "done"
    stamps = device.to_host([arena.tensor("stamps")])[0].tolist()[:200]
    assert stamps == sorted(stamps)
    assert all(end - start >= 20_000 for start, end in zip(stamps[::2], stamps[1::2], strict=True))


def test_the_host_waits_no_longer_than_it_is_told_to(arena_of_kind: CudaArena, pair: Pair) -> None:
    fence = arena_of_kind.fence(FenceName.DRAFT_PROPOSED)
    started = time.monotonic()
    assert not fence.wait_on_host(1, 0.05)
    assert time.monotonic() - started >= 0.05
    producer, _ = attached(pair, arena_of_kind)
    producer.do("spin 50000", f"signal {PROPOSED} 3")
    assert fence.wait_on_host(3, 10.0)
    assert fence.poll() == 3


def test_a_release_never_sets_a_counter_back(arena_of_kind: CudaArena) -> None:
    fence = arena_of_kind.fence(FenceName.VERIFY_STASH)
    for released, counter in ((5, 5), (3, 5), (2**40, 2**40)):
        fence.release(released)
        assert fence.poll() == counter


def test_who_waits_for_a_producer_that_was_killed_is_released(device: CudaDevice, arena: CudaArena) -> None:
    """With work in flight: the owner's write ends the wait, and the stream goes on."""
    with GpuUser.on(arena) as producer, GpuUser.on(arena) as consumer:
        producer.do("spin 60000000", f"signal {PROPOSED} 1")
        consumer.do(f"wait {PROPOSED} 1", "fill lengths 4", "copy lengths 1")
        assert consumer.ask("sync 0.1") == "late"
        producer.kill()
        assert consumer.ask("sync 0.1") == "late"
        arena.fence(FenceName.DRAFT_PROPOSED).release(1)
        assert consumer.ask("sync 10") == "done"
        assert seen(arena, device, 2) == [0, 4]
        consumer.do("fill lengths 5", "copy lengths 2")
        assert consumer.ask("sync 10") == "done"
        assert seen(arena, device, 3) == [0, 4, 5]


def test_a_process_may_release_its_own_stream(arena: CudaArena, pair: Pair) -> None:
    """A worker that lost its scheduler does: from a stream of its own that never waits."""
    consumer, _ = attached(pair, arena)
    consumer.do(f"wait {PROPOSED} 7", f"release {PROPOSED} 7")
    assert consumer.ask("sync 10") == "done"


@pytest.mark.parametrize("device_of_kind", ["event"], indirect=True)
def test_who_waits_for_an_event_of_a_killed_producer_can_only_be_killed(
    arena_of_kind: CudaArena, device_of_kind: CudaDevice
) -> None:
    """An event fence leaves the consumer hanging, which a `timeline` fence avoids; owner and successor are unharmed.

    By itself the consumer might not end, because unmapping its memory waits for the stream.
    """
    with GpuUser.on(arena_of_kind) as producer, GpuUser.on(arena_of_kind) as consumer:
        consumer.do("fill tokens 4")
        assert consumer.ask("sync 10") == "done"
        producer.do("spin 60000000", f"signal {PROPOSED} 1")
        consumer.do(f"wait {PROPOSED} 1", "fill tokens 5")
        producer.kill()
        arena_of_kind.fence(FenceName.DRAFT_PROPOSED).release(1)
        assert arena_of_kind.fence(FenceName.DRAFT_PROPOSED).wait_on_host(1, 10.0)
        assert consumer.ask("sync 0.5") == "late"
        consumer.kill()
    assert device_of_kind.to_host([arena_of_kind.tensor("tokens")])[0].tolist() == [4, 4, 4, 4]
    following = device_of_kind.create_arena(SPECS, list(FenceName))
    with GpuUser.on(following) as successor:
        successor.do("fill tokens 6", f"signal {PROPOSED} 1")
        assert following.fence(FenceName.DRAFT_PROPOSED).wait_on_host(1, 10.0)
    assert device_of_kind.to_host([following.tensor("tokens")])[0].tolist() == [6, 6, 6, 6]
    following.close()
