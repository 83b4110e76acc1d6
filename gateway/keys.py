"""API keys: who calls, and how much of the server each caller may use."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
import time
from collections import Counter
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import (
    RETRY_AFTER_MS,
    ConfigError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from slipstream.common.rpc.interceptor import ServerInterceptor, is_health_check, refusing, replaced
from slipstream.protos import generation_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from slipstream.common.rpc.interceptor import Continuation, Handle
    from slipstream.common.wire.sequence import SequenceSpec
    from slipstream.gateway.job import Job
    from slipstream.gateway.sample import Sample

logger = logging.getLogger(__name__)

NO_OWNER = ""
"""The owner of what is called for without a key, where none is asked for."""
LOOK_INTERVAL_S = 1.0
"""A change of the file counts after this time at the latest."""
MIN_TOKEN_CHARACTERS = 16
_ACCEPTED = f"lines NAME:TOKEN, a name of letters, digits or ._-, a token of {MIN_TOKEN_CHARACTERS} characters or more"
_LINE = re.compile(rf"([A-Za-z0-9._-]{{1,64}}):([!-~]{{{MIN_TOKEN_CHARACTERS},1024}})")

_DELIVER = f"/{generation_pb2.DESCRIPTOR.services_by_name['Generation'].full_name}/Deliver"
_DIGEST_DIGITS = 32
"""Hexadecimal digits of a token's SHA-256 in the name of its key."""

_owner: ContextVar[str] = ContextVar("owner", default=NO_OWNER)
_client: ContextVar[str | None] = ContextVar("client", default=None)


def current_owner() -> str:
    """Returns the key of the present call, as `KeyFile.find` names it; `NO_OWNER` where none is asked for."""
    return _owner.get()


def act_for(client: str, owner: str) -> None:
    """Makes the present call one of this client and owner: another gateway forwarded it, and has checked the key."""
    _client.set(client)
    _owner.set(owner)


def forwarded_for() -> str | None:
    """Returns the client for whom another gateway forwarded the present call; None if the client called."""
    return _client.get()


def client_of(context: Any) -> str:
    """Names the client of a call, also if another gateway forwarded it."""
    return forwarded_for() or str(context.peer())


def key_or_client_of(context: Any) -> str:
    """Names the key of a call, or its client where no key is asked for."""
    return current_owner() or client_of(context)


class KeyFile:
    """The keys of a file of lines NAME:TOKEN; empty lines and lines that begin with # do not count.

    Keeps only hashes of the tokens. Reads the file again when it has changed; if it then is wrong, the keys stay.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError naming `api_keys`, and the line that is wrong, without its content."""
        self._path = path
        self._clock = clock
        self._look_at = clock() + LOOK_INTERVAL_S
        self._version = self._find_version()
        self._names = self._read()
        if not self._names:
            raise ConfigError("api_keys", str(path), f"a file with keys: {_ACCEPTED}")

    def find(self, token: str) -> str | None:
        """Returns the key with this token, in a time that does not depend on how much of one is right.

        As NAME:DIGEST, so that another token under the same name has nothing of this one.
        """
        self._look()
        digest, found = _digest(token), None
        for known, name in self._names:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _look(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_INTERVAL_S
        try:
            version = self._find_version()
            if version == self._version:
                return
            # Also when the file is wrong: it is said once.
            self._version = version
            self._names = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("read %d API keys again", len(self._names))

    def _find_version(self) -> tuple[int, int, int] | None:
        """Differs from time to time when the file does; None if it cannot be read."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[tuple[bytes, str], ...]:
        names: dict[str, bytes] = {}
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                mode = stat.S_IMODE(self._path.stat().st_mode)
                lines = file.read().splitlines()
        except OSError as error:
            raise ConfigError("api_keys", str(self._path), f"a file that this user can read ({error})") from error
        if mode & 0o022:
            raise ConfigError("api_keys", f"{self._path} (mode {mode:04o})", "a file that no other user can write to")
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:
                raise ConfigError("api_keys", f"{self._path}, line {number}", _ACCEPTED)
            name, digest = match[1], _digest(match[2])
            if name in names or digest in names.values():
                raise ConfigError("api_keys", f"{self._path}, line {number}", "each name and each token once")
            names[name] = digest
        return tuple((digest, f"{name}:{digest.hex()[:_DIGEST_DIGITS]}") for name, digest in names.items())


class KeyInterceptor(ServerInterceptor):
    """Lets calls in that have a key, in the metadata `authorization: Bearer TOKEN`; health checks need none.

    Bounds the streams that a key has open.
    """

    def __init__(self, keys: KeyFile, *, max_streams: int | None = None) -> None:
        self._keys = keys
        self._is_optional = False
        self._max_streams = max_streams
        self._num_streams: Counter[str] = Counter()

    def optional(self) -> KeyInterceptor:
        """The same for a private address: a call without a key is this user's own, and sees all jobs."""
        other = copy(self)
        other._is_optional = True
        return other

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Wraps the handler of a call, or replaces it by a refusal."""
        handler = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        is_own = self._is_optional and all(key != "authorization" for key, _ in metadata)
        if handler is None or is_own or is_health_check(handler_call_details):
            return handler
        owner = self._owner_of(handler_call_details.invocation_metadata)
        if owner is None:
            return refusing(handler, UnauthenticatedError("no valid API key: send `authorization: Bearer TOKEN`"))
        # The outputs in a delivery are those of other streams, which count.
        is_stream = handler.response_streaming and handler_call_details.method != _DELIVER
        return replaced(handler, lambda handle: self._owned(handle, owner, is_stream=is_stream))

    def _owner_of(self, metadata: Any) -> str | None:
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            return None
        scheme, _, token = given[0].partition(" ")
        return self._keys.find(token.strip()) if scheme.lower() == "bearer" else None

    def _owned(self, handle: Handle, owner: str, *, is_stream: bool) -> Handle:
        async def call(request: Any, context: Any) -> Any:
            _owner.set(owner)
            if not is_stream:
                return await handle(request, context)
            if self._max_streams is not None and self._num_streams[owner] >= self._max_streams:
                message = f"this key has {self._num_streams[owner]} streams open, of at most {self._max_streams}"
                raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)
            self._num_streams[owner] += 1
            try:
                return await handle(request, context)
            finally:
                self._num_streams[owner] -= 1
                if not self._num_streams[owner]:
                    del self._num_streams[owner]

        return call


def check_quota(
    max_tokens: int | None, owner: str, samples: Iterable[SequenceSpec], alive: Iterable[tuple[Sample, Job]]
) -> None:
    """Checks a new job of these samples against the tokens that each owner may have in flight; None sets no limit.

    A sample counts with its prompt and its `max_new_tokens`, from the job's creation until the sample has ended;
    `alive` are all that have not. Raises ResourceExhaustedError if the job's tokens are too many now,
    InvalidArgumentError if they always are.
    """
    if max_tokens is None:
        return
    wanted = sum(map(_tokens_of, samples))
    if wanted > max_tokens:
        given = f"{wanted} tokens, with the prompt and all samples"
        raise InvalidArgumentError("sampling_params.max_new_tokens", given, f"at most {max_tokens} for a key together")
    in_flight = sum(_tokens_of(sample.spec) for sample, job in alive if job.owner == owner)
    if in_flight + wanted > max_tokens:
        message = f"this key has {in_flight} tokens in flight; {wanted} more exceed {max_tokens}"
        raise ResourceExhaustedError(message, retry_after_ms=RETRY_AFTER_MS)


def _tokens_of(spec: SequenceSpec) -> int:
    return len(spec.prompt) + spec.max_new_tokens


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
