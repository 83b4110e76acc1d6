"""What a scheduler says of its prefix cache: every page that it has, and each change, to any number of watchers."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from slipstream.common.errors import ResourceExhaustedError
from slipstream.protos import scheduler_pb2 as pb
from slipstream.scheduler import page_log
from slipstream.scheduler.page_log import PageLog, PageWatch
from slipstream.scheduler.pages import PrefixCache
from slipstream.scheduler.records import NO_DRAFT, DraftKV, Prefix
from tests.harness.scheduler_server import Gateway, served_scheduler
from tests.scheduler.test_service import SPEC, dummies

PAGE = 4


class Mirror:
    """A watcher's copy of the cache."""

    def __init__(self, watch: PageWatch) -> None:
        self.pages: dict[bytes, tuple[bytes, bytes]] = {}
        self._watch = watch

    def read(self) -> None:
        """Takes in all changes; a page is told after the one before it."""
        while taken := self._watch.take():
            for change in taken:
                if change.tokens:
                    assert change.key not in self.pages
                    self.pages[change.key] = (change.parent, change.tokens)
                else:
                    del self.pages[change.key]


@pytest.mark.parametrize("seed", range(5))
def test_watchers_have_what_the_cache_has(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they begin, and whatever is kept, used again, replaced for a draft's sake, evicted or dropped."""
    monkeypatch.setattr(page_log, "MAX_IN_MESSAGE", 3)
    rng = random.Random(seed)
    cache = PrefixCache(12, PAGE)
    cache.log = PageLog()
    salted: set[bytes] = set()
    running: list[tuple[Prefix, list[int], Any]] = []
    with ExitStack() as held:
        mirrors = [Mirror(held.enter_context(cache.log.watching(lambda: None)))]
        for step in range(200):
            if step % 50 == 49:
                mirrors.append(Mirror(held.enter_context(cache.log.watching(lambda: None))))
            tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 4) * PAGE + 1)], np.int32)
            prefix = Prefix(rng.choice(("", "", "a tenant")), PAGE)
            salted.update(prefix.keys(tokens, len(tokens) // PAGE) if prefix.is_salted else ())
            draft = rng.choice((NO_DRAFT, DraftKV(attachment=1, is_paged=True)))
            found = cache.begin(prefix, tokens, len(tokens), draft, ())
            needed = -(-len(tokens) // PAGE) - len(found or ())
            if found is not None and needed <= cache.num_free:
                pages = [*found, *cache.allocate(needed)]
                cache.keep(prefix, pages, tokens, len(tokens))
                running.append((prefix, pages, tokens))
            elif found:
                cache.release(found)
            if running and (rng.random() < 0.6 or needed > cache.num_free):
                _, pages, _ = running.pop(rng.randrange(len(running)))
                if rng.random() < 0.2:
                    cache.drop(pages)
                cache.release(pages)
            if rng.random() < 0.3:
                rng.choice(mirrors).read()
        for mirror in mirrors:
            mirror.read()
            assert mirror.pages == mirrors[0].pages
        assert set(mirrors[0].pages) == set(cache._entries) - salted
        assert mirrors[0].pages


def test_a_watcher_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_log, "MAX_UNREAD", 2)
    log = PageLog()
    with log.watching(lambda: None) as slow, log.watching(lambda: None) as quick:
        for number in range(3):
            log.stored(bytes([number]), b"", np.array([number], np.int32))
            assert [change.key for change in quick.take()] == [bytes([number])]
        with pytest.raises(ResourceExhaustedError, match="unread"):
            slow.take()


async def test_a_caller_gets_the_pages_and_their_changes(tmp_path: Path) -> None:
    """The tokens of a prompt by its pages, each with the one before; a later caller gets them all at once."""
    prompt = tuple(range(1, 14))
    async with (
        served_scheduler(tmp_path, *dummies(), fixed_draft_tokens=2, page_events=True) as served,
        Gateway(served) as gateway,
    ):
        await gateway.attached()
        early = served.stub.WatchPages(pb.WatchPagesRequest())
        assert not (await early.read()).changes
        (number,) = await gateway.submit(replace(SPEC, prompt=prompt, max_new_tokens=2))
        await gateway.until(lambda: number in gateway.ends)
        late = served.stub.WatchPages(pb.WatchPagesRequest())
        for call in (early, late):
            changes: list[Any] = []
            async with asyncio.timeout(20):
                while len(changes) < 3:
                    changes += (await call.read()).changes
            assert [token for change in changes for token in change.token_ids] == list(prompt[:12])
            assert [change.parent for change in changes] == [0, *(change.key for change in changes[:-1])]
            call.cancel()


async def test_a_scheduler_says_nothing_of_its_cache_unless_it_is_to(tmp_path: Path) -> None:
    async with served_scheduler(tmp_path, *dummies(), fixed_draft_tokens=2) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.WatchPages(pb.WatchPagesRequest()).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
