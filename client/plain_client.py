"""A client of the `Generation` service for programs without an event loop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

import grpc

from slipstream.client.requests import (
    RECONNECT_S,
    RETRIED,
    OutputReader,
    Reconnection,
    build,
    channel_options,
    job_request,
    new_job_id,
    our_errors,
)
from slipstream.common.api.job_info import JobInfo, JobPage
from slipstream.common.api.server_state import ServerState
from slipstream.common.errors import ConnectionLostError
from slipstream.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import TracebackType
    from typing import Unpack

    from slipstream.client.requests import Prompt, RequestOptions
    from slipstream.common.api.output_chunk import OutputChunk
    from slipstream.common.rpc.keepalive import Keepalive


class Client:
    """One connection to a server, for any number of threads. As `AsyncClient`, but that every call blocks.

    >>> with Client("127.0.0.1:50051") as client:
    ...     for chunk in client.generate("Once upon a time", max_new_tokens=64):
    ...         print(chunk.text, end="")
    """

    def __init__(self, address: str, *, keepalive: Keepalive | None = None) -> None:
        """`address`: HOST:PORT or unix:PATH. Connects with the first call."""
        self._channel = grpc.insecure_channel(address, options=channel_options(keepalive))
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and every call on it, those of other threads too."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, job_id: str = "", timeout_s: float | None = None, **options: Unpack[RequestOptions]
    ) -> Generator[OutputChunk, None, None]:
        """Continues a text or token ids, or answers a conversation, and yields the output as it comes.

        Closing the generator cancels the job. See `AsyncClient.generate`.
        """
        request = job_request(generation_pb2.GenerateRequest, prompt, job_id, options)
        return self._chunks(self._stub.Generate, request, OutputReader(), timeout_s)

    def create_job(
        self,
        prompt: Prompt,
        *,
        job_id: str = "",
        timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
        **options: Unpack[RequestOptions],
    ) -> JobInfo:
        """Creates a job that goes on without this client. See `AsyncClient.create_job`."""
        request = job_request(generation_pb2.CreateJobRequest, prompt, job_id or new_job_id(), options)
        retry = Reconnection(reconnect_s, timeout_s)
        while True:
            try:
                with our_errors():
                    return JobInfo.from_pb(self._stub.CreateJob(request, timeout=retry.time_left_s).job)
            except ConnectionLostError as error:
                time.sleep(retry.pause_after(error))

    def watch_job(
        self,
        job_id: str,
        from_token: int | Sequence[int] = 0,
        *,
        timeout_s: float | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> Generator[OutputChunk, None, None]:
        """Yields a job's output from a token on, up to its end, lost connections or not.

        See `AsyncClient.watch_job`.
        """
        reader, retry = OutputReader(from_token), Reconnection(reconnect_s, timeout_s)
        while not reader.is_over:
            try:
                for chunk in self._chunks(self._stub.WatchJob, reader.request(job_id), reader, retry.time_left_s):
                    retry.came_through()
                    yield chunk
            except RETRIED as error:
                time.sleep(retry.pause_after(error))

    def get_job(self, job_id: str) -> JobInfo:
        """How far a job is. Raises NotFoundError if there never was one, or it ended too long ago."""
        with our_errors():
            return JobInfo.from_pb(self._stub.GetJob(build(generation_pb2.GetJobRequest, job_id=job_id)).job)

    def list_jobs(self, *, page_size: int = 0, page_token: str = "") -> JobPage:
        """Some of the jobs that wait, run, or ended not long ago, the latest first."""
        request = build(generation_pb2.ListJobsRequest, page_size=page_size, page_token=page_token)
        with our_errors():
            return JobPage.from_pb(self._stub.ListJobs(request))

    def cancel_job(self, job_id: str) -> None:
        """Ends a job; its streams then end with the reason "abort". See `AsyncClient.cancel_job`."""
        with our_errors():
            self._stub.CancelJob(build(generation_pb2.CancelJobRequest, job_id=job_id))

    def server_info(self) -> ServerState:
        """What the server runs, and how full it is."""
        with our_errors():
            return ServerState.from_pb(self._stub.GetServerInfo(generation_pb2.GetServerInfoRequest()))

    def _chunks(
        self, method: Any, request: Any, reader: OutputReader, timeout_s: float | None
    ) -> Generator[OutputChunk, None, None]:
        call = method(request, timeout=timeout_s)
        try:
            with our_errors():
                for message in call:
                    chunk = reader.read(message)
                    if chunk is not None:
                        yield chunk
            reader.check_end()
        finally:
            call.cancel()
