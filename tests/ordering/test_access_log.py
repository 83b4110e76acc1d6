"""The logs of accesses, line by line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from slipstream.common.wire.access_log import AccessLog, JsonLinesAccessLog, LogOp, StreamName
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import FenceName, Role

if TYPE_CHECKING:
    from pathlib import Path


def use(log: AccessLog) -> None:
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
    use(JsonLinesAccessLog(path, StreamName.DRAFT))
    every = {"stream": "draft", "step": 7, "epoch": 2}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {**every, "seq": 0, "op": "send", "role": "draft"},
        {**every, "seq": 1, "op": "recv"},
        {**every, "seq": 2, "op": "wait", "attachment": 0, "fence": "VERIFY_STASH", "value": 6},
        {**every, "seq": 3, "op": "read", "attachment": 0, "buffer": "seq_lens", "rows": [1, 3]},
        {**every, "seq": 4, "op": "write", "attachment": 0, "buffer": "draft_tokens", "rows": [1, 3]},
        {**every, "seq": 5, "op": "signal", "attachment": 0, "fence": "DRAFT_PROPOSED", "value": 7},
        {**every, "seq": 6, "op": "poll", "attachment": 0, "fence": "DRAFT_PROPOSED", "value": 7, "step": 8},
        {
            **every,
            "seq": 7,
            "op": "release",
            "attachment": 0,
            "fence": "VERIFY_PUBLISH",
            "value": 5,
            "step": 5,
            "epoch": 1,
        },
        {**every, "seq": 8, "op": "recv", "step": 8},
    ]


def test_a_command_writes_out_what_came_before_it(tmp_path: Path) -> None:
    path = tmp_path / "verify.jsonl"
    log = JsonLinesAccessLog(path, StreamName.VERIFY)
    log.recv(epoch=1, step=1)
    log.access(BufferName.SEQ_LENS, [1], is_write=True, step=1)
    log.recv(epoch=1, step=2)
    assert [json.loads(line)["op"] for line in path.read_text().splitlines()][:2] == ["recv", "write"]
    log.close()


def test_two_incarnations_do_not_share_a_file(tmp_path: Path) -> None:
    JsonLinesAccessLog(tmp_path / "verify.jsonl", StreamName.VERIFY).close()
    with pytest.raises(FileExistsError):
        JsonLinesAccessLog(tmp_path / "verify.jsonl", StreamName.VERIFY)


def test_nothing_is_kept_where_nothing_is_logged() -> None:
    log = AccessLog()
    assert not log.is_enabled
    use(log)
