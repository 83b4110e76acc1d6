"""The thread that attaches grammar workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from slipstream.common.device.cpu.device import HostDevice
from slipstream.scheduler.grammar_session import GrammarSession
from slipstream.scheduler.link import Link
from tests.harness.waiting import block_until


class FaultyLink:
    """A link with a mistake of ours in it."""

    def __init__(self) -> None:
        self.num_detached = 0

    def describe(self) -> None:
        """Fails by no error of a worker."""
        raise RuntimeError("a mistake of ours")

    def detach(self, *, drain: bool) -> bool:
        """See `Link.detach`."""
        self.num_detached += 1
        return False


def test_a_try_that_fails_by_a_mistake_of_ours_leaves_no_link_open() -> None:
    links: list[FaultyLink] = []

    def make_link() -> Link:
        links.append(FaultyLink())
        return cast("Link", links[-1])

    session = GrammarSession(
        HostDevice(),
        make_link=make_link,
        next_number=lambda seen: seen + 1,
        registry=CollectorRegistry(),
        wake=lambda: None,
    )
    session.start()
    epoch: Any = SimpleNamespace(constraints=SimpleNamespace())
    session.enter(epoch)
    block_until(lambda: len(links) == 2)
    session.leave()
    session.join()
    assert [link.num_detached for link in links] == [1] * len(links)
