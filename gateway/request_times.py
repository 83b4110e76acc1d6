"""The times of the last requests on their way to their first token, and the `Recorder` service that returns them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.common.rpc.interceptor import reject_unknown_fields
from slipstream.common.worker.recorder import Record, Site
from slipstream.common.worker.trace import HostRecords
from slipstream.gateway.keys import NO_OWNER, current_owner
from slipstream.protos import trace_pb2, trace_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.gateway.job import Job
    from slipstream.gateway.running_sequence import SequenceStats

RECORDER = trace_pb2.DESCRIPTOR.services_by_name["Recorder"].full_name
CAPACITY = 2048
"""Requests that are kept."""


class RequestTimes:
    """A ring of the last requests. Belongs to the event loop."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._requests: OrderedDict[int, _Request] = OrderedDict()

    def add(self, job: Job, received_ns: int, tokenised_ns: int) -> None:
        """Adds a request by its job, unless it is there; the oldest one goes. Times are of `time.monotonic_ns`."""
        stats = tuple(sample.stats for sample in job.samples)
        self._requests.setdefault(job.number, _Request(job.owner, received_ns, tokenised_ns, stats))
        if len(self._requests) > self._capacity:
            self._requests.popitem(last=False)

    def records(self, owner: str = NO_OWNER, from_number: int = 0) -> Iterator[Record]:
        """Yields what has happened of an owner's requests, or of all for `NO_OWNER`, from a job's number on."""
        for number, request in self._requests.items():
            if number < from_number or owner not in (NO_OWNER, request.owner):
                continue
            yield Record(Site.TOKENISE, number, request.received_ns, request.tokenised_ns)
            submitted_ns = _first_ns(stats.submitted_at for stats in request.stats)
            if submitted_ns is None:
                continue
            yield Record(Site.SUBMIT, number, request.tokenised_ns, submitted_ns)
            sent_ns = _first_ns(stats.first_sent_at for stats in request.stats)
            if sent_ns is not None:
                yield Record(Site.FIRST_TOKEN, number, submitted_ns, sent_ns)


class RecorderServicer(trace_pb2_grpc.RecorderServicer):
    """Serves `Recorder` on a gateway: with an API key, that key's requests; where none is asked for, all."""

    def __init__(self, times: RequestTimes) -> None:
        self._times = times

    async def ReadRecords(self, request: trace_pb2.ReadRecordsRequest, context: Any) -> trace_pb2.ReadRecordsResponse:
        """See trace.proto."""
        reject_unknown_fields(request)
        records = self._times.records(current_owner(), request.from_step)
        return HostRecords(0, tuple(records), None).to_pb()


class _Request(NamedTuple):
    owner: str
    received_ns: int
    tokenised_ns: int
    stats: tuple[SequenceStats, ...]
    """For each sample; they are still written."""


def _first_ns(times: Iterator[float | None]) -> int | None:
    return min((round(1e9 * time) for time in times if time is not None), default=None)
