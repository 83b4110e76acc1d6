"""The settings of a scheduler process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - `with_options` reads the annotations
from typing import Any

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.address import parse_address
from slipstream.common.settings import Settings, duration, setting
from slipstream.common.wire.step import EVEN_DRAFT_TOKENS, RowTokens

DISPATCH_TOGETHER = "together"
DISPATCH_ACKNOWLEDGED = "acknowledged"
DEVICES = ("auto", "cpu", "cuda")
FENCES = ("auto", "timeline", "event")
"""Kinds of fences on a GPU; a CPU has one kind."""
AUTO = "auto"
MOST_DRAFT_TOKENS = 15
"""The largest K: a row of a step then has 16 tokens."""
DEFAULT_DRAFT_TOKENS = 4
"""K of a draft that drafts K tokens for all or none, where no number is given."""
AUTO_DRAFT_TOKENS = {
    RowTokens.WHOLE: DEFAULT_DRAFT_TOKENS,
    RowTokens.EVEN: EVEN_DRAFT_TOKENS[-1],
    RowTokens.RAGGED: MOST_DRAFT_TOKENS,
}
"""K where no number is given."""
DRAFT_TOKENS_HELP = (
    "Most tokens drafted for a request in a step: each step has as many for each request as are fastest, 0 included. "
    f"auto: {MOST_DRAFT_TOKENS}; on a GPU {EVEN_DRAFT_TOKENS[-1]}, as all requests of a step have as many there."
)
_DAY_S = 86_400


def parse_number_or_auto(word: str) -> int | None:
    """Reads a number of tokens, or milliseconds: None for "auto". Raises ValueError."""
    return None if word == AUTO else int(word)


def draft_tokens_setting(help: str, *, unset: str) -> Any:
    """A setting of a number of draft tokens; without one, what `unset` says."""
    return setting(None, help=help, unit="K", low=1, high=MOST_DRAFT_TOKENS, unset=unset)


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings, heading="Steps and memory"):
    """The scheduler's settings that `slipstream up` has, too, and passes on."""

    run_ahead: int = setting(
        1, help="Steps sent before the result of the first is known, less one.", unit="R", low=0, high=8
    )
    slots: int = setting(16, help="Requests that run at the same time.", unit="N", low=1, high=4096)
    context_tokens: int | None = setting(
        None,
        help="Tokens of a request, prompt and output together.",
        unit="N",
        low=2,
        high=2**24,
        unset="what the models allow",
    )
    # Less is taken where the slots cannot use it all. "What is free" is without what the workers need and the reserve.
    kv_memory_mib: int | None = setting(
        None,
        help="Memory for the KV pages of both workers together, in MiB. Running requests hold pages for their tokens "
        "so far; without free ones the youngest of the lowest priority waits again.",
        unit="N",
        low=1,
        high=2**24,
        unset="512 on a CPU, on a GPU what is free",
    )
    page_tokens: int | None = setting(
        None,
        help="Tokens in a KV page. Pages of 64 or a multiple are what attention to prompts is fastest with on a GPU; "
        "smaller ones share shorter beginnings of prompts.",
        unit="N",
        low=1,
        high=4096,
        unset="64 on a GPU, 16 on a CPU",
    )
    max_batched_tokens: int | None = setting(
        None,
        help="Tokens of a step that takes in prompts: what it decodes beside, K + 1 a request, and prompt tokens. auto "
        "measures at the start how many keep the pause of the others short.",
        unit="N|auto",
        low=1,
        high=2**16,
        accepted="1 to 65536, or auto",
        parse=parse_number_or_auto,
        unset=AUTO,
    )
    itl_target_ms: int | None = setting(
        None,
        help="Longest time between two tokens of a request, about, while prompts are taken in. auto: 50 ms on a GPU, "
        "and twice that while a crowd of prompts waits; on a CPU as long again as a step that decodes.",
        unit="MS|auto",
        low=1,
        high=60_000,
        accepted="1 to 60000, or auto",
        parse=parse_number_or_auto,
        unset=AUTO,
    )
    fixed_draft_tokens: int | None = draft_tokens_setting(
        "Measuring: draft K tokens for each request in each step, whatever it costs, in place of --num-draft-tokens.",
        unset="none",
    )
    no_prefix_cache: bool = setting(
        False, help="Compute every prompt whole: share no KV pages of requests that begin with the same tokens."
    )
    device: str = setting("auto", help="What computes; the same for all services.", choices=DEVICES)
    fence: str = setting(
        "auto",
        help="How streams wait for each other on a GPU: by stream memory operations or IPC events; auto takes the "
        "first of both that works.",
        choices=FENCES,
    )
    memory_reserve_mib: int = setting(
        1024,
        help="GPU memory that is left free, in MiB, where --kv-memory-mib is not given: another draft may arrive.",
        unit="N",
        low=0,
        high=2**24,
    )
    draft_timeout_ms: float | None = setting(
        None,
        help="Time that a step waits for the draft; then it goes on without, and the draft counts as lost.",
        unit="MS",
        above=0,
        high=1000 * _DAY_S,
        unset="two steps, at least 50 on a GPU and 250 on a CPU",
    )
    grammar_timeout_ms: float | None = setting(
        None,
        help="Time that a step waits for the grammar worker; then that counts as lost, and sequences with a constraint "
        "wait for another one.",
        unit="MS",
        above=0,
        high=1000 * _DAY_S,
        unset="as for the draft",
    )
    step_timeout_s: float = duration(60.0, help="Time that verify may take for a step; then it counts as lost.")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(ServingSettings, heading="Scheduler"):
    """Checked when it is built; the command line takes its options from here."""

    verify: str = setting(help="Address of the verify service, unix:PATH.", unit="ADDRESS")
    draft: str | None = setting(
        None, help="Address of the draft service; without one, verify decodes plainly.", unit="ADDRESS"
    )
    grammar: str | None = setting(
        None, help="Address of the grammar worker; without one, no request may have a constraint.", unit="ADDRESS"
    )
    page_events: bool = setting(False, help="Tell gateways what the prefix cache has, for routers.")
    max_sequences: int = setting(
        8192,
        help="Sequences held at most, waiting and running, of all gateways together; more are refused.",
        unit="N",
        low=1,
        high=2**21,
    )
    num_draft_tokens: int | None = setting(
        None,
        help=DRAFT_TOKENS_HELP,
        unit="K|auto",
        low=1,
        high=MOST_DRAFT_TOKENS,
        accepted=f"1 to {MOST_DRAFT_TOKENS}, or auto",
        parse=parse_number_or_auto,
        unset=AUTO,
    )
    swapped_draft_tokens: int | None = draft_tokens_setting(
        "Most tokens drafted for a request in a step, if a swap has chosen fewer than --num-draft-tokens.",
        unset="--num-draft-tokens",
    )
    grace_s: float = duration(30.0, help="After the first SIGTERM, running jobs may take this long.")
    dispatch: str = setting(
        DISPATCH_TOGETHER,
        help="Measuring: acknowledged sends a command when all that it waits for was acknowledged.",
        choices=(DISPATCH_TOGETHER, DISPATCH_ACKNOWLEDGED),
    )
    debug: bool = setting(False, help="Check the FutureMap's rules at run time.")
    access_log_dir: Path | None = setting(
        None, help="Debugging: log accesses to shared memory there, for the happens-before checker.", unit="DIR"
    )

    def draft_tokens(self, row_tokens: RowTokens) -> int:
        """K of a draft for which a swap has named no number, and the most that it may name."""
        return self.fixed_draft_tokens or self.num_draft_tokens or AUTO_DRAFT_TOKENS[row_tokens]

    def __post_init__(self) -> None:
        """Raises ConfigError naming the field."""
        super().__post_init__()
        parse_address(self.verify, field="verify")
        if self.draft is not None:
            parse_address(self.draft, field="draft")
        if self.grammar is not None:
            parse_address(self.grammar, field="grammar")
        if self.fixed_draft_tokens is not None and self.num_draft_tokens is not None:
            raise ConfigError("fixed_draft_tokens", self.fixed_draft_tokens, "none with --num-draft-tokens")
        if self.itl_target_ms is not None and (self.max_batched_tokens is not None or self.debug):
            accepted = "auto with --max-batched-tokens, --deterministic or --debug"
            raise ConfigError("itl_target_ms", self.itl_target_ms, accepted)
        if (self.swapped_draft_tokens or 0) > (most := self.draft_tokens(RowTokens.RAGGED)):
            raise ConfigError("swapped_draft_tokens", self.swapped_draft_tokens, f"1 to {most}")
        if self.device == "cpu" and self.fence != "auto":
            raise ConfigError("fence", self.fence, "auto on a CPU")
