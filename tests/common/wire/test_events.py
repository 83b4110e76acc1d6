"""The ring of a process's last events, the time in which threads were blocked, and the file of the order."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from slipstream.common.wire.events import CAPACITY, Event, EventLog, LogOp, Site, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName, Role


def test_the_newest_are_kept() -> None:
    log = EventLog()
    for step in range(1, CAPACITY + 4):
        log.add(Site.ENQUEUE, step, step, step + 1)
    assert [event.step for event in log.since(0)] == list(range(4, CAPACITY + 4))
    last = CAPACITY + 3
    assert log.since(last) == [Event(Site.ENQUEUE, last, last, last + 1)]


def test_an_epoch_begins_with_nothing() -> None:
    log = EventLog()
    log.add(Site.ENQUEUE, 7, 1, 2)
    log.begin_epoch(4)
    assert (log.since(0), log.epoch) == ([], 4)


def test_a_block_within_another_counts_for_that_alone() -> None:
    log = EventLog()
    with log.blocked(Site.ATTACH), log.blocked(Site.STAGING, 3):
        pass
    assert [site for site in Site if log.stalled_ns[site]] == [Site.ATTACH]
    with log.blocked(Site.STAGING, 4):
        pass
    (attach, staging) = log.since(0)
    assert (attach.site, staging.site, staging.step) == (Site.ATTACH, Site.STAGING, 4)
    for event in (attach, staging):
        assert log.stalled_ns[event.site] == event.end_ns - event.begin_ns > 0


def test_blocks_of_another_thread_count() -> None:
    log = EventLog()

    def stage() -> None:
        with log.blocked(Site.STAGING):
            pass

    with log.blocked(Site.ATTACH):
        thread = threading.Thread(target=stage)
        thread.start()
        thread.join()
    assert log.stalled_ns[Site.STAGING] > 0


def use(log: EventLog) -> None:
    log.send(Role.DRAFT, epoch=2, step=7)
    log.recv(epoch=2, step=7)
    log.fence(LogOp.WAIT, FenceName.VERIFY_STASH, 6, step=7)
    log.access(BufferName.SEQ_LENS, [1, 3], is_write=False, step=7)
    log.access(BufferName.DRAFT_TOKENS, (1, 3), is_write=True, step=7)
    log.fence(LogOp.SIGNAL, FenceName.DRAFT_PROPOSED, 7, step=7)
    log.fence(LogOp.POLL, FenceName.DRAFT_PROPOSED, 7, step=8)
    log.release(FenceName.VERIFY_PUBLISH, 5, epoch=1)
    log.recv(epoch=2, step=8)
    log.close()


def test_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "draft.jsonl"
    use(EventLog(StreamName.DRAFT, path))
    every = {"stream": "draft", "step": 7, "epoch": 2}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {**every, "seq": 0, "op": "send", "role": "draft"},
        {**every, "seq": 1, "op": "recv"},
        {**every, "seq": 2, "op": "wait", "attachment": 0, "fence": "VERIFY_STASH", "value": 6},
        {**every, "seq": 3, "op": "read", "attachment": 0, "buffer": "seq_lens", "rows": [1, 3]},
        {**every, "seq": 4, "op": "write", "attachment": 0, "buffer": "draft_tokens", "rows": [1, 3]},
        {**every, "seq": 5, "op": "signal", "attachment": 0, "fence": "DRAFT_PROPOSED", "value": 7},
        {**every, "seq": 6, "op": "poll", "attachment": 0, "fence": "DRAFT_PROPOSED", "value": 7, "step": 8},
        {**every, "seq": 7, "op": "release", "attachment": 0, "fence": "VERIFY_PUBLISH", "value": 5}
        | {"step": 5, "epoch": 1},
        {**every, "seq": 8, "op": "recv", "step": 8},
    ]


def test_a_command_writes_out_what_came_before_it(tmp_path: Path) -> None:
    path = tmp_path / "verify.jsonl"
    log = EventLog(StreamName.VERIFY, path)
    log.recv(epoch=1, step=1)
    log.access(BufferName.SEQ_LENS, [1], is_write=True, step=1)
    log.recv(epoch=1, step=2)
    assert [json.loads(line)["op"] for line in path.read_text().splitlines()][:2] == ["recv", "write"]
    log.close()


def test_two_incarnations_do_not_share_a_file(tmp_path: Path) -> None:
    EventLog(StreamName.VERIFY, tmp_path / "verify.jsonl").close()
    with pytest.raises(FileExistsError):
        EventLog(StreamName.VERIFY, tmp_path / "verify.jsonl")
