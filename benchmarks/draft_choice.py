"""How many tokens the scheduler chooses to draft, by a GPU's measured costs, beside every fixed number of them.

The scheduler's batch and its choice are the real ones; steps take the time that they took on the GPU, and draft tokens
are accepted by chance, by survival curves. So a run needs no device. Steps of one request and of 64 were measured for
K = 4 and without a draft; between and beyond them times are taken to grow evenly with the tokens, and a chain with K.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.benchmarks.charts import draw_draft_choice
from slipstream.benchmarks.models import THREE
from slipstream.benchmarks.runner import Names, Row, Table, benchmark, load, medians, told
from slipstream.common.settings import Settings, setting
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import EVEN_DRAFT_TOKENS, RowTokens
from slipstream.common.wire.worker import StepCost
from slipstream.scheduler.batch import Batch
from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.records import ChooseDraftTokens, DraftKV, Sequence, Step, StepResult, most_tokens
from slipstream.scheduler.sizes import BatchSizes
from slipstream.scheduler.waiting_queue import WaitingQueue

MOST = 15
FEW = 16
"""Batches of fewer sequences make four times as many steps."""
UNIFORM = (0, *EVEN_DRAFT_TOKENS)
"""Numbers, where all sequences of a step have as many, as on a GPU."""
FIXED = (0, 1, 2, 3, 4, 5, 7, 10, 15)
BATCHES = ("1", "4", "16", "64", "256")
CURVES = {"math": 0.87, "chat": 0.76, "hard text": 0.45}
"""Share of drafted tokens that are accepted after those before them: of published lengths (SpecForge), about."""
MIX = "mix"
"""A third of the running sequences of each, at any time; of one at a time, a third of all."""
CELL = 0.98
"""Least tokens per second, as a share of the best fixed number's; with a mix of sequences it is to be faster."""
OUTPUT_TOKENS = 400
SHAPE = "llama-3.1-8b"
KV_MS = 0.045
"""Milliseconds of verify for the keys and values of a row's context, as both measurements agree on it."""
WAY_BACK = 4
"""Steps in which the draft comes back."""
KEPT_PART = 0.2
"""Share of a chain's first forward that a step costs which only takes in what was stashed."""


@dataclass(frozen=True, kw_only=True)
class ChoicePlan(Settings):
    """The settings of a simulation."""

    batches: Names = Names.of(BATCHES)
    curves: Names = Names.of((*CURVES, MIX))
    steps: int = setting(1200, help="Steps of a run.", unit="N", low=200)
    seed: int = setting(1, help="Seed of the acceptance.", unit="N")


class MeasuredCosts:
    """The times of steps, in seconds."""

    def __init__(self) -> None:
        plain = medians([row for row in load("plain_h200") if row["shape"] == SHAPE], ("batch",), ("verify_ms",))
        decode = [row for row in load("decode_h200") if (row["shape"], row["mode"]) == (SHAPE, THREE)]
        drafted = sorted(medians(decode, ("batch",), ("draft_ms", "verify_ms")), key=itemgetter("batch"))
        verify = {row["batch"]: row["verify_ms"] - KV_MS * row["batch"] for row in plain}
        verify |= {5 * row["batch"]: row["verify_ms"] - KV_MS * row["batch"] for row in drafted}
        self._tokens = np.array(sorted(verify))
        self._verify_ms = np.maximum.accumulate(np.array([verify[tokens] for tokens in sorted(verify)]))
        self._rows = np.array([row["batch"] for row in drafted])
        self._forward_ms = np.array([row["draft_ms"] / 5 for row in drafted])

    def verify_s(self, rows: int, tokens: int) -> float:
        """Verify's part."""
        return (_evenly(tokens, self._tokens, self._verify_ms) + KV_MS * rows) / 1e3

    def rest_s(self, rows: int, chain: int, *, is_kept: bool) -> float:
        """Draft's part, of K + 1 forwards; the first takes in what was stashed."""
        forward_ms = _evenly(rows, self._rows, self._forward_ms)
        return forward_ms * (chain + 1 if chain else KEPT_PART * is_kept) / 1e3


def _evenly(place: float, places: np.ndarray, values: np.ndarray) -> float:
    """Between places, and beyond the last ones."""
    if place <= places[-1]:
        return float(np.interp(place, places, values))
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    return float(values[-1] + slope * (place - places[-1]))


@dataclass
class Server:
    """A batch whose steps are simulated, one sent before the result of the last is known."""

    num_rows: int
    shares: tuple[float, ...]
    """Share of accepted tokens of one sequence after the other."""
    costs: MeasuredCosts
    rng: np.random.Generator
    num_draft_tokens: int | None = None
    """None chooses."""
    rows: RowTokens = RowTokens.RAGGED
    """EVEN chooses as many for all sequences, as where workers run graphs by rows."""
    most: int = MOST

    def __post_init__(self) -> None:
        sizes = BatchSizes(
            num_slots=self.num_rows + 1,
            num_pages=self.num_rows * 16 + 1,
            page_tokens=64,
            chunk_tokens=2048,
            num_draft_tokens=self.most,
            run_ahead=1,
            row_tokens=self.rows,
        )
        self._batch, self._queue, self._num_added = Batch(sizes), WaitingQueue(2 * self.num_rows), 0
        self._queue.open(1)
        self.choice = DraftChoice(sizes.num_slots, self.most)
        self._measure()
        self._shares = np.zeros(sizes.num_slots)
        self._sent: list[tuple[Step, float, float, bool]] = []
        """Steps under way, with their time, verify's part of it, and whether it says what decoding takes."""
        self._way_back, self._was_mixed = 0, False

    def _measure(self) -> None:
        """Has the choice begin with what workers measure when they are attached."""
        rows = [1 << power for power in range(self.num_rows.bit_length() + 1)]
        sizes, costs = list(product(rows, range(self.most + 1))), self.costs
        verify = [(*size, costs.verify_s(size[0], size[0] * (size[1] + 1))) for size in sizes]
        draft = [(*size, costs.rest_s(*size, is_kept=True)) for size in sizes]
        self.choice.costs.begin(StepCost(rows, count, round(1e9 * seconds)) for rows, count, seconds in verify)
        self.choice.joined(StepCost(rows, count, round(1e9 * seconds)) for rows, count, seconds in draft)

    def run(self, num_steps: int) -> float:
        """Makes steps; returns tokens per second."""
        num_tokens, seconds = 0, 0.0
        for _ in range(num_steps):
            if (step := self._next_step()) is None:  # what is left is sure to end
                num_tokens += self._consume(*self._sent.pop(0))
                continue
            rows, chain = len(step.decoded.slots), step.most_draft_tokens
            verify_s = self.costs.verify_s(rows, step.num_decoded_tokens + step.num_prompt_tokens)
            step_s = verify_s + self.costs.rest_s(rows, chain, is_kept=step.is_kept)
            self._sent.append((step, step_s, verify_s, not (step.chunks or self._was_mixed) and rows > 0))
            self._was_mixed, seconds = bool(step.chunks), seconds + step_s
            if len(self._sent) > 1:
                num_tokens += self._consume(*self._sent.pop(0))
        return num_tokens / seconds

    def _next_step(self) -> Step | None:
        for _ in range(self.num_rows - self._batch.num_running):
            self._queue.add(self._sequence())
        self._batch.admit(self._queue)
        for slot, sequence in self._batch._running.items():
            number = slot if self.num_rows >= len(self.shares) else sequence.id
            self._shares[slot] = self.shares[number % len(self.shares)]
        choose: ChooseDraftTokens = most_tokens
        num_draft_tokens, is_alone = self.num_draft_tokens, False
        if num_draft_tokens is None:
            self._way_back = self._way_back - 1 if self.choice.drafts else WAY_BACK
            num_draft_tokens = self.most if self._way_back <= 0 else 0
            choose, is_alone = self.choice.choose, self.choice.decodes_alone()
        draft = DraftKV(attachment=1) if num_draft_tokens else DraftKV()
        step = self._batch.next_step(
            num_draft_tokens,
            decodes_first=is_alone,
            evens=self.rows.evens(num_draft_tokens),
            draft=draft,
            choose=choose,
        )
        if step is not None:
            self.choice.sending(decodes=bool(step.decoded.slots), takes_prompts=bool(step.chunks))
        return step

    def _sequence(self) -> Sequence:
        self._num_added += 1
        spec = SequenceSpec(
            job_id=str(self._num_added),
            prompt=(1, self._num_added),
            max_new_tokens=OUTPUT_TOKENS,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
        )
        return Sequence(spec, self._num_added)

    def _consume(self, step: Step, seconds: float, verify_s: float, is_alone: bool) -> int:
        rows = step.yielding.rows
        is_right = self.rng.random((len(rows), MOST)) < self._shares[rows, None]
        most = np.minimum(step.most_more - 1, MOST)
        accepted = np.minimum(is_right.cumprod(axis=1).sum(axis=1), most).astype(np.uint32)
        found = (accepted + 1).astype(np.int32)
        outcome = self._batch.apply(step, StepResult(accepted, found, np.zeros((len(rows), self.most + 1), np.int64)))
        self._batch.take_output()
        self._batch.grow_ahead()
        self.choice.take_in(outcome)
        if is_alone:
            self.choice.took(step, seconds, verify_s, has_draft=step.is_kept)
        return int(outcome.num_tokens.sum())


def sample(plan: ChoicePlan, costs: MeasuredCosts, batch: int, curve: str) -> Row:
    """The tokens per second of every fixed number and of the choice."""
    shares = tuple(CURVES.values()) if curve == MIX else (CURVES[curve],)

    def rate(fixed: int | None = None, **about: Any) -> float:
        server = Server(batch, shares, costs, np.random.default_rng(plan.seed), fixed, **about)
        server.run(plan.steps // 5)
        return server.run(plan.steps * (1 if batch >= FEW else 4))

    rates = {fixed: rate(fixed) for fixed in FIXED}
    best, chosen = max(rates, key=lambda fixed: rates[fixed]), rate()
    return {
        "batch": batch,
        "curve": curve,
        "tokens_per_second": chosen,
        "best_fixed": best,
        "ratio": chosen / rates[best],
        "gain": chosen / rates[0],
        "uniform_ratio": rate(rows=RowTokens.EVEN, most=UNIFORM[-1]) / max(rates[fixed] for fixed in UNIFORM),
        "fixed": {f"K = {fixed}": tokens for fixed, tokens in rates.items()},
    }


@benchmark(ChoicePlan)
async def main(plan: ChoicePlan, file: Path | None) -> Many[str]:
    """Simulates every number of draft tokens, and the scheduler's choice, for each batch and survival curve."""
    costs, order = MeasuredCosts(), lambda row: row["batch"]
    table = Table(file, "batch", "curve", order=order, picture=draw_draft_choice)
    for batch, curve in product(map(int, plan.batches), plan.curves):
        table.add(sample(plan, costs, batch, curve))
    cells = [(row, CELL if row["curve"] != MIX else 1.0) for row in table.rows]
    return [f"{told(row, 'batch', 'curve', 'ratio')}: at least {least}" for row, least in cells if row["ratio"] < least]
