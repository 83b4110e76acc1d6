"""Tells what this worker's host did in its last steps."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import SlipstreamError
from slipstream.common.worker.trace import HostRecords
from slipstream.protos import trace_pb2, trace_pb2_grpc

if TYPE_CHECKING:
    from slipstream.common.device.clock import ClockSample
    from slipstream.common.device.interface import Device
    from slipstream.common.worker.recorder import FlightRecorder

logger = logging.getLogger(__name__)

SERVICE_NAME = trace_pb2.DESCRIPTOR.services_by_name["Recorder"].full_name


class RecorderServicer(trace_pb2_grpc.RecorderServicer):
    """Serves `Recorder`."""

    def __init__(self, recorder: FlightRecorder, device: Device) -> None:
        self._recorder = recorder
        self._device = device

    async def ReadRecords(self, request: trace_pb2.ReadRecordsRequest, context: Any) -> trace_pb2.ReadRecordsResponse:
        """See trace.proto."""
        records = tuple(self._recorder.since(request.from_step))
        # Not on the thread that owns the device: steps are enqueued there.
        clock = await asyncio.to_thread(_sample_clock, self._device)
        return HostRecords(self._recorder.epoch, records, clock).to_pb()


def _sample_clock(device: Device) -> ClockSample | None:
    try:
        return device.sample_clock()
    except SlipstreamError as error:
        logger.warning("the clock of the stamps cannot be read: %s", error)
        return None
