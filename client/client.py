"""An asynchronous client of the `Generation` service."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import grpc.aio

from slipstream.common.chunk import Chunk
from slipstream.common.errors import InternalError, InvalidArgumentError, UnavailableError
from slipstream.common.keepalive import Keepalive
from slipstream.common.server_state import ServerState
from slipstream.common.status import error_from_rpc
from slipstream.protos import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence
    from types import TracebackType


class AsyncClient:
    """One connection to a server. Errors are those of `slipstream.common.errors`, as the server raised them.

    >>> async with AsyncClient("127.0.0.1:50051") as client:
    ...     async for chunk in client.generate("Once upon a time", max_new_tokens=64):
    ...         print(chunk.text, end="")
    """

    def __init__(self, address: str, *, keepalive: Keepalive | None = None) -> None:
        """`address`: HOST:PORT or unix:PATH. Connects with the first call; make it on the event loop."""
        options = [*(keepalive or Keepalive()).options(), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every call on it."""
        await self._channel.close(None)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        job_id: str = "",
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Continues a text, or token ids, and yields the output as it comes; closing the generator cancels the job.

        Parameters are those of generation.proto; None takes the server's default. `timeout_s` bounds the whole
        call, then DeadlineExceededError is raised. Raises InternalError when the server left out or repeated tokens.
        """
        params = _build(
            generation_pb2.SamplingParams,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        if isinstance(prompt, str):
            request = _build(generation_pb2.GenerateRequest, job_id=job_id, text=prompt, sampling_params=params)
        else:
            ids = _build(generation_pb2.TokenIds, ids=prompt)
            request = _build(generation_pb2.GenerateRequest, job_id=job_id, input_ids=ids, sampling_params=params)
        return self._chunks(request, timeout_s)

    async def cancel_job(self, job_id: str) -> None:
        """Ends a job; its stream then ends with the reason "abort". Raises NotFoundError if it is not alive."""
        with _our_errors():
            await self._stub.CancelJob(_build(generation_pb2.CancelJobRequest, job_id=job_id))

    async def server_info(self) -> ServerState:
        """What the server runs, and how full it is."""
        with _our_errors():
            return ServerState.from_pb(await self._stub.GetServerInfo(generation_pb2.GetServerInfoRequest()))

    async def _chunks(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Chunk, None]:
        num_tokens = 0
        is_over = False
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            with _our_errors():
                async for message in call:
                    chunk = Chunk.from_pb(message)
                    if chunk.token_offset != num_tokens:
                        raise InternalError(f"token {num_tokens} was expected, token {chunk.token_offset} came")
                    num_tokens += len(chunk.token_ids)
                    is_over = chunk.finish_reason is not None
                    yield chunk
            if not is_over:
                raise UnavailableError("the stream ended before the job did")
        finally:
            call.cancel()


def _build(kind: Any, **values: Any) -> Any:
    """A message; what does not fit its field's type is refused as the server would, but for the name of the field."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        given = {name: value for name, value in values.items() if value is not None}
        raise InvalidArgumentError(kind.__name__, given, f"what generation.proto says ({error})") from error


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
