"""The demo's result: the same work with and without drafting, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from slipstream.cli.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """All prompts at once, through one scheduler."""

    title: str
    token_ids: tuple[tuple[int, ...], ...]
    """Of each prompt's output."""
    seconds: float
    """From the first request to the last token."""
    num_verify_steps: int
    total_draft_tokens: int
    total_accepted_tokens: int
    times: StepTimes

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Of all outputs together."""
        return self.num_tokens / self.seconds

    @property
    def mean_accept_length(self) -> float:
        """Tokens that a verify step brings a request: 1 + accepted / steps."""
        return 1.0 + self.total_accepted_tokens / self.num_verify_steps if self.num_verify_steps else 1.0


def comparison(with_draft: DemoRun, without: DemoRun) -> Table:
    """A row for each measure, a column for each run."""
    table = Table(title="The same prompts, seeds and target")
    table.add_column("")
    runs = (with_draft, without)
    for run in runs:
        table.add_column(run.title, justify="right")
    rows = {
        "tokens": [f"{run.num_tokens}" for run in runs],
        "seconds": [f"{run.seconds:.2f}" for run in runs],
        "tokens per second": [f"{run.tokens_per_second:.1f}" for run in runs],
        "drafted, accepted": [f"{run.total_draft_tokens}, {run.total_accepted_tokens}" for run in runs],
        "mean accept length": [f"{run.mean_accept_length:.2f}" for run in runs],
        "steps, mean time": [f"{run.times.num_steps:.0f}, {run.times.mean_step_s * 1e3:.1f} ms" for run in runs],
        "bubble in all": [f"{run.times.bubble_s * 1e3:.0f} ms" for run in runs],
        "overlap efficiency": [f"{run.times.overlap_efficiency:.3f}" for run in runs],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    return table


def speed_sentence(with_draft: DemoRun, without: DemoRun) -> str:
    """Whether drafting paid here, in plain words."""
    ratio = with_draft.tokens_per_second / without.tokens_per_second
    if abs(ratio - 1) < 0.05:
        return "Drafting is neither faster nor slower here."
    if ratio > 1:
        return f"Drafting is {ratio:.2f} times as fast as no drafting here."
    return (
        f"Drafting is slower here, {ratio:.2f} times the speed: a step brings each prompt "
        f"{with_draft.mean_accept_length:.1f} tokens, but on this machine to draft and check them takes longer still."
    )


def first_difference(with_draft: DemoRun, without: DemoRun) -> tuple[int, int] | None:
    """Prompt and token index of the first token id that differs; None when all are the same."""
    for prompt, pair in enumerate(zip(with_draft.token_ids, without.token_ids, strict=True)):
        if pair[0] != pair[1]:
            same = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
            return prompt, same
    return None
