"""Errors in OpenAI's form: a status, and an object with message, type, param and code."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from slipstream.common.errors import (
    AlreadyExistsError,
    CancelledError,
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SlipstreamError,
    UnauthenticatedError,
    UnavailableError,
    shorten,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

INVALID = "invalid_request_error"
_KINDS: dict[type[SlipstreamError], tuple[int, str, str | None]] = {
    InvalidArgumentError: (400, INVALID, None),
    UnauthenticatedError: (401, INVALID, "invalid_api_key"),
    NotFoundError: (404, INVALID, "not_found"),
    AlreadyExistsError: (409, INVALID, "already_exists"),
    ResourceExhaustedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    UnavailableError: (503, "server_error", "unavailable"),
    CancelledError: (503, "server_error", "cancelled"),
    DeadlineExceededError: (504, "server_error", "timeout"),
    ConfigError: (401, INVALID, "invalid_api_key"),
    FailedPreconditionError: (503, "server_error", "unavailable"),
    SlipstreamError: (500, "server_error", None),
}
"""Status, type and code; a class that is not here has those of its nearest base that is. The settings of a client are
its key."""
_NAMES = (
    (r"^sampling_params\.max_new_tokens$", "max_tokens"),
    (r"^sampling_params\.min_new_tokens$", "min_tokens"),
    (r"^(sampling_params|speculation)\.", ""),
    (r"^(text|input_ids(\.ids)?)", "prompt"),
    (r"^messages\.(tools|continue_final_message|add_generation_prompt)", r"\1"),
    (r"^messages\.template_kwargs\.reasoning_effort$", "reasoning_effort"),
    (r"^messages\.template_kwargs", "chat_template_kwargs"),
    (r"^messages\.items", "messages"),
    (r"^choice\.items", "choice"),
)
"""Our names of fields as patterns, and OpenAI's; the first that is found counts."""
_NAMES_WITHIN = (
    (r"(tool_calls\[\d+\])\.(name|arguments)", r"\1.function.\2"),
    (r"\.content_parts", ".content"),
)
"""Patterns of what may follow a name, and OpenAI's words for it; each that is found counts."""


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        """The object of the answer."""


def refused(param: str, given: object, accepted: str, *, code: str | None = None) -> ApiError:
    """An error that names a field, what was given and what is accepted."""
    return ApiError(400, f"{param}: got {shorten(given)}, accepted: {accepted}", param=param, code=code)


def api_error(error: SlipstreamError, names: dict[str, str]) -> ApiError:
    """Turns an error of the gateway into an answer. `names`: fields that the call has other names for than most."""
    status, kind, code = next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)
    if isinstance(error, InvalidArgumentError):
        root, rest = re.fullmatch(r"(\w*)(.*)", _name(error.field), re.DOTALL).groups()  # type: ignore[union-attr]
        param = names.get(root, root) + rest
        is_long = param in ("prompt", "messages", "input") and "context" in error.description
        found = "context_length_exceeded" if is_long else None
        return ApiError(400, f"{param}: {error.description}", param=param, code=found)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if isinstance(error, ResourceExhaustedError) and retry_after_ms is None:
        return ApiError(413, str(error), code="request_too_large")
    headers = [] if retry_after_ms is None else [(b"retry-after", b"%d" % max(1, math.ceil(retry_after_ms / 1000)))]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    return ApiError(status, str(error), kind=kind, code=code, headers=headers)


def _name(field: str) -> str:
    changed = (re.sub(pattern, name, field) for pattern, name in _NAMES)
    field = next((name for name in changed if name != field), field)
    for pattern, name in _NAMES_WITHIN:
        field = re.sub(pattern, name, field)
    return field
