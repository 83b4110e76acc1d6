"""The settings of a scheduler process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

DISPATCH_TOGETHER = "together"
DISPATCH_ACKNOWLEDGED = "acknowledged"
DEVICES = ("auto", "cpu", "cuda")
FENCES = ("auto", "timeline", "event")
"""Of a GPU; a CPU has one kind."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Checked when it is built; the command line takes its defaults from here."""

    verify: str
    """Address of the verify service."""
    draft: str | None = None
    """Address of the draft service; None decodes plainly."""
    num_draft_tokens: int = 4
    """Tokens drafted in a step (K)."""
    run_ahead: int = 1
    """Steps that are sent before the result of the first of them is known, less one (R)."""
    slots: int = 16
    """Requests that run at the same time."""
    context_tokens: int | None = None
    """Prompt and output of a request together; None is what both models were made for."""
    kv_memory_mib: int | None = None
    """KV pages of both workers together; less is taken where the slots cannot use it all.

    None is 512 on a CPU, and on a GPU all that is free, less what the workers need for their work and a reserve.
    """
    memory_reserve_mib: int = 1024
    """GPU memory that is left free where kv_memory_mib does not say how much is taken: another draft may come."""
    page_tokens: int = 16
    """Tokens in a KV page."""
    chunk_tokens: int = 512
    """Prompt tokens in one prefill step."""
    queue: int = 256
    """Requests that may wait for a slot."""
    stream_interval_ms: float = 5.0
    """A client gets a message at most this often; steps that are faster share one."""
    kept_jobs: int = 1000
    """Jobs that are kept after their end, so that they can still be watched and asked after."""
    job_ttl_s: float = 600.0
    """... and for how long."""
    read_timeout_s: float = 30.0
    """A stream is cut off when its client reads nothing for so long."""
    step_timeout_s: float = 60.0
    """A step that takes longer means that a worker hangs."""
    grace_s: float = 30.0
    """After the first signal to end, running jobs may take this long."""
    dispatch: str = DISPATCH_TOGETHER
    """ "together", or "acknowledged": a command is sent when all that it waits for was acknowledged."""
    device: str = "auto"
    """Where the shared memory is: "auto", "cpu" or "cuda"; as the workers have it."""
    fence: str = "auto"
    """How streams wait for each other on a GPU: "timeline", "event", or "auto", the first of both that works."""
    debug: bool = False
    """Check the FutureMap's rules at run time."""
    access_log_dir: Path | None = None
    """Log every access to shared memory there, for the happens-before checker."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field."""
        for name, value, low, high in (
            ("num_draft_tokens", self.num_draft_tokens, 1, 16),
            ("run_ahead", self.run_ahead, 0, 8),
            ("slots", self.slots, 1, 4096),
            ("context_tokens", 2 if self.context_tokens is None else self.context_tokens, 2, 2**24),
            ("kv_memory_mib", 1 if self.kv_memory_mib is None else self.kv_memory_mib, 1, 2**24),
            ("memory_reserve_mib", self.memory_reserve_mib, 0, 2**24),
            ("page_tokens", self.page_tokens, 1, 4096),
            ("chunk_tokens", self.chunk_tokens, 1, 2**16),
            ("queue", self.queue, 1, 2**20),
            ("kept_jobs", self.kept_jobs, 0, 2**20),
        ):
            if not low <= value <= high:
                raise ConfigError(name, value, f"{low} to {high}")
        for name, seconds in (
            ("job_ttl_s", self.job_ttl_s),
            ("read_timeout_s", self.read_timeout_s),
            ("step_timeout_s", self.step_timeout_s),
            ("grace_s", self.grace_s),
        ):
            if not 0 < seconds < 86_400:
                raise ConfigError(name, seconds, "above 0, less than a day")
        if not 0 <= self.stream_interval_ms <= 10_000:
            raise ConfigError("stream_interval_ms", self.stream_interval_ms, "0 to 10000")
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, ", ".join(DEVICES))
        if self.fence not in FENCES:
            raise ConfigError("fence", self.fence, ", ".join(FENCES))
        if self.device == "cpu" and self.fence != "auto":
            raise ConfigError("fence", self.fence, "auto on a CPU")
        if self.dispatch not in (DISPATCH_TOGETHER, DISPATCH_ACKNOWLEDGED):
            raise ConfigError("dispatch", self.dispatch, f"{DISPATCH_TOGETHER} or {DISPATCH_ACKNOWLEDGED}")
