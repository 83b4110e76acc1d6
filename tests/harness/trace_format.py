"""Checks that a file is in the Trace Event Format, and that its timeline makes sense."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Thread = tuple[int, int]


def slices_by_thread(content: Any) -> dict[Thread, list[Event]]:
    """The complete events of each thread, in the file's order."""
    found: dict[Thread, list[Event]] = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def arrows(content: Any) -> list[tuple[Event, Event]]:
    """The flow events in pairs, each beginning with its end."""
    begun = {event["id"]: event for event in content["traceEvents"] if event["ph"] == "s"}
    return [(begun[event["id"]], event) for event in content["traceEvents"] if event["ph"] == "f"]


def check(content: Any) -> None:
    """Fails an assertion where a viewer would show something wrong, or nothing."""
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    assert {event["ph"] for event in content["traceEvents"]} == {"M", "X", "s", "f"}
    _check_names(content)
    for slices in slices_by_thread(content).values():
        _check_nesting(slices)
    _check_arrows(content)


def _check_names(content: Any) -> None:
    named: dict[str, set[object]] = defaultdict(set)
    for event in content["traceEvents"]:
        if event["ph"] == "M":
            key = event["pid"] if event["name"].startswith("process") else (event["pid"], event["tid"])
            assert key not in named[event["name"]], "a name is given twice"
            named[event["name"]].add(key)
    threads = set(slices_by_thread(content))
    assert len({thread for _, thread in threads}) == len(threads), (
        "Perfetto takes a thread's number for the whole of it"
    )
    assert named["thread_name"] == named["thread_sort_index"] == threads
    assert named["process_name"] == named["process_sort_index"] == {process for process, _ in threads}


def _check_nesting(slices: list[Event]) -> None:
    """In order of time; a slice is either within the one before it, or behind it."""
    open_until: list[float] = []
    last = 0.0
    for event in slices:
        begin, end = event["ts"], round(event["ts"] + event["dur"], 3)
        assert math.isfinite(begin)
        assert event["dur"] >= 0
        assert begin >= last, "out of order"
        last = begin
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{event['name']} overlaps what it is in"
        open_until.append(end)


def _check_arrows(content: Any) -> None:
    ids = [(event["ph"], event["id"]) for event in content["traceEvents"] if event["ph"] in "sf"]
    assert len(set(ids)) == len(ids), "an id stands for two arrows"
    assert {number for ph, number in ids if ph == "s"} == {number for ph, number in ids if ph == "f"}
    slices = slices_by_thread(content)
    for begin, end in arrows(content):
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"]), "what makes one arrow of two events"
        assert end["bp"] == "e"
        assert begin["ts"] <= end["ts"], "back in time"
        for event in (begin, end):
            assert around(slices[event["pid"], event["tid"]], event["ts"]), f"{event} is within no slice"


def around(slices: list[Event], time_us: float) -> list[Event]:
    """The slices that a moment lies in, the outermost first."""
    return [event for event in slices if event["ts"] <= time_us < round(event["ts"] + event["dur"], 3)]
