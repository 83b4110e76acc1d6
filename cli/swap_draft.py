"""`slipstream swap-draft`: has a running server change its draft, and shows the effect."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.cli.hub import MODEL_UNIT, find_model
from slipstream.cli.models import ALGORITHMS, INFERRED, WITHOUT_MODEL, algorithm_of, check_without_model
from slipstream.common.errors import ConfigError
from slipstream.common.rpc.address import parse_address
from slipstream.common.settings import Settings, setting, shared
from slipstream.common.wire.server import (
    DEFAULT_JUDGE_STEPS,
    DEFAULT_ROLLBACK_BELOW,
    MAX_JUDGE_STEPS,
    DraftSwap,
    SwapOutcome,
    SwapTerms,
)
from slipstream.scheduler.config import draft_tokens_setting


@dataclass(frozen=True, kw_only=True)
class SwapOptions(Settings):
    """The options of the command. Raises ConfigError naming what contradicts another."""

    draft: str | None = setting(
        None,
        unit=MODEL_UNIT,
        help="Directory of the new draft model, or its name on the hub; with --address, the address of its service.",
    )
    algorithm: str | None = setting(
        None,
        choices=ALGORITHMS,
        help="How it drafts; ngram has no model, none takes the draft away. With --address, only none.",
        unset=INFERRED,
    )
    num_draft_tokens: int | None = draft_tokens_setting(
        "Most tokens drafted for a request in a step.", unset="as many as the server was started with"
    )
    judge_steps: int = setting(
        DEFAULT_JUDGE_STEPS,
        unit="N",
        help="Steps before and after that are compared; 0 does not judge.",
        low=0,
        high=MAX_JUDGE_STEPS,
    )
    rollback_below: float = setting(
        DEFAULT_ROLLBACK_BELOW,
        unit="R",
        help="Roll back if the new draft has fewer than R times the old draft's accepted tokens in a step, counted up "
        "to the smaller number of draft tokens.",
        low=0,
        high=1000,
    )
    address: str | None = setting(
        None, unit="ADDRESS", help="Scheduler to ask, where no `up` runs: in containers.", unset="none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_without_model(self.algorithm, draft=self.draft, num_draft_tokens=self.num_draft_tokens)
        if self.draft is None and self.algorithm not in WITHOUT_MODEL:
            raise ConfigError("draft", None, "a draft, or --algorithm ngram or none")
        if self.address is not None and self.algorithm not in (None, "none"):
            raise ConfigError("algorithm", self.algorithm, "only none with --address: a draft service has its own")
        for name in ("address", "draft") if self.address is not None else ():
            if (given := getattr(self, name)) is not None:
                parse_address(given, field=name)

    @property
    def directory(self) -> Path | None:
        """Absolute directory of the draft, which may be downloaded. Raises ConfigError."""
        return None if self.draft is None else find_model("draft", Path(self.draft)).absolute()


async def run_swap(options: SwapOptions, state_dir: Path, *, as_json: bool) -> int:
    """Asks the `up` with this state directory, or a scheduler; gives the exit status: 1 if it was rolled back.

    Raises SlipstreamError when nothing was swapped.
    """
    from slipstream.cli.draft_swaps import request_swap, swap_at

    terms = shared(SwapTerms, options)
    if options.address is not None:
        outcome = await swap_at(options.address, DraftSwap(address=options.draft or "", terms=terms))
    else:
        directory = options.directory
        outcome = await request_swap(state_dir, directory, options.algorithm or algorithm_of(directory), terms)
    if as_json:
        print(json.dumps(asdict(outcome)))
    else:
        print_outcome(outcome)
    return 1 if outcome.rolled_back else 0


def print_outcome(outcome: SwapOutcome) -> None:
    """Prints the figures as a table, and below it whether the new draft was kept."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "algorithm", "draft tokens", "steps", "accept length", "tokens/s", "step ms"):
        table.add_column(heading, justify="left" if heading in ("", "algorithm") else "right")
    for name, figures in (("before", outcome.before), ("after", outcome.after)):
        means = (f"{figures.accept_length:.2f}", f"{figures.tokens_per_second:.0f}", f"{figures.step_ms:.2f}")
        counted = means if figures.num_steps else ("-", "-", "-")
        table.add_row(name, figures.algorithm, f"{figures.num_draft_tokens}", f"{figures.num_steps}", *counted)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"rolled back: {outcome.reason}" if outcome.rolled_back else "swapped", markup=False)
    if outcome.longest_pause_ms:
        console.print(f"longest pause between two steps: {outcome.longest_pause_ms:.1f} ms")
