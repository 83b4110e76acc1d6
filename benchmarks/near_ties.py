"""How often do two ways of serving part in bfloat16, how near a tie is it there, and what does it cost never to?

    python benchmarks/near_ties.py --device cuda --json benchmarks/results/near_ties_h200.json

Held-out prompts, each greedy and at T = 0.8 with two seeds; without a draft and with the bundled ones; alone and eight
at a time. Each output is compared with plain decoding's, alone. Where the two part, the target's own scores in float32
say how far the worse of both tokens is behind the best: rounding explains a near tie and nothing else. Then the same
with `--deterministic`, where nothing may part, and what a step takes with it and without, in turns.

    python benchmarks/near_ties.py --device cpu --prompts 4 --tokens 24

computes in float32, in which nothing may part either. Status 1 if a parting is no near tie, if there is one where none
may be, or if a part failed; what was found until then is in the JSON.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from transformers import AutoTokenizer

from slipstream.benchmarks.hardware import host
from slipstream.benchmarks.local_serving import LocalServices
from slipstream.benchmarks.near_tie_scores import BOUND, Scores
from slipstream.bundled import eagle3_dir, prompts, standalone_dir, target_dir
from slipstream.common.api.sampling import SamplingParams
from slipstream.common.api.sequence import SequenceSpec
from slipstream.common.device.choose import CPU, choose_device
from slipstream.common.worker.step import StepKind
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.core.sequence import Sequence
from slipstream.services.worker.config import EAGLE3, STANDALONE, WorkerConfig
from slipstream.services.worker.factory import dtype_of, make_draft, make_verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slipstream.benchmarks.local_serving import LocalServing
    from slipstream.benchmarks.near_tie_scores import Parting
    from slipstream.common.device.interface import Device
    from slipstream.services.worker.engine import RoleEngine

NONE = "none"
DRAFTS = {NONE: None, STANDALONE: standalone_dir(), EAGLE3: eagle3_dir()}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "T = 0.8, seed 1": SamplingParams(temperature=0.8, seed=1),
    "T = 0.8, seed 2": SamplingParams(temperature=0.8, seed=2),
}
NUM_DRAFT_TOKENS = 4
TOGETHER = 8
KV_MIB = 256
LIMIT_S = 240.0
"""No part begins later: far more than all three drafts take on a GPU, where starting their services is much of it."""
ROUNDS = 7
"""Windows of either mode, in turns, for the price."""
WINDOW_TOKENS = 64
"""That each request of a window gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of serving against plain decoding alone."""

    deterministic: bool
    draft: str
    at_once: int
    outputs: int
    tokens: int
    """Compared: up to the parting, and it."""
    partings: int
    per_1000_tokens: float
    largest_gap: float | None
    """None where nothing parts."""
    all_near_ties: bool
    seconds: float
    """To serve the outputs."""
    scoring_seconds: float
    """To say how near a tie the partings are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a decode step takes, in microseconds: medians of windows in turns."""

    draft: str
    at_once: int
    step_us: float
    deterministic_step_us: float
    ratio: float
    """The median of the rounds' ratios."""


@dataclass(slots=True)
class Report:
    """Everything, written after each part."""

    host: str
    dtype: str
    bound: float
    num_draft_tokens: int
    num_prompts: int
    num_deterministic_prompts: int
    samplings: list[str]
    max_new_tokens: int
    rows: list[Row] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class NearTies:
    """The measurement."""

    def __init__(
        self,
        device: Device,
        report: Report,
        path: Path | None,
        *,
        drafts: tuple[str, ...] = tuple(DRAFTS),
        rounds: int = ROUNDS,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`drafts`: none comes first, as what the others are compared with."""
        self._drafts = drafts
        self._rounds = rounds
        self._limit_s = limit_s
        self._device = device
        self._report = report
        self._path = path
        self._scores = Scores(target_dir())
        self._tokenizer = AutoTokenizer.from_pretrained(target_dir())
        self._references: dict[bool, list[list[int]]] = {}
        self._partings: dict[tuple[object, ...], Parting | None] = {}
        self._started = time.monotonic()

    def run(self) -> None:
        """All drafts; a part that fails does not keep the others from being tried."""
        for draft in self._drafts:
            self._part(f"draft {draft}", partial(self._measure, draft))

    def _measure(self, draft: str) -> None:
        with (
            self._serving(draft, is_deterministic=False) as usual,
            self._serving(draft, is_deterministic=True) as deterministic,
        ):
            for serving, is_deterministic in ((usual, False), (deterministic, True)):
                for at_once in (1, TOGETHER):
                    work = partial(self._compare, serving, draft, at_once, is_deterministic=is_deterministic)
                    self._part(f"{_mode(is_deterministic)}, draft {draft}, {at_once} at once", work)
            for at_once in (1, TOGETHER):
                work = partial(self._price, usual, deterministic, draft, at_once)
                self._part(f"price, draft {draft}, {at_once} at once", work)

    @contextmanager
    def _serving(self, draft: str, *, is_deterministic: bool) -> Iterator[LocalServing]:
        """Services and a loop for as long as the context; tells what their start took."""
        begun = time.monotonic()
        with LocalServices(self._device, lambda: self._roles(draft, is_deterministic=is_deterministic)) as services:
            loaded = time.monotonic()
            with services.serving(self._config()) as serving:
                ready = time.monotonic()
                print(
                    f"{_mode(is_deterministic)}, draft {draft}: ready {ready - self._started:.1f} s after the start "
                    f"(models loaded in {loaded - begun:.1f} s, steps prepared in {ready - loaded:.1f} s)",
                    flush=True,
                )
                yield serving

    def _part(self, name: str, work: Callable[[], None]) -> None:
        if time.monotonic() - self._started > self._limit_s:
            self._report.problems.append(f"{name}: no time left")
            self._keep()
            return
        try:
            work()
        except Exception as error:
            self._report.problems.append(f"{name}: {type(error).__name__}: {error}")
            print(self._report.problems[-1], flush=True)
        self._keep()

    def _keep(self) -> None:
        self._report.seconds = time.monotonic() - self._started
        if self._path is not None:
            self._path.write_text(json.dumps(asdict(self._report), indent=1) + "\n", encoding="utf-8")

    def _compare(self, serving: LocalServing, draft: str, at_once: int, *, is_deterministic: bool) -> None:
        report, started = self._report, time.monotonic()
        num_prompts = report.num_deterministic_prompts if is_deterministic else report.num_prompts
        jobs = self._jobs(num_prompts, report.max_new_tokens)
        outputs = serving.run(jobs, at_once=at_once)
        served = time.monotonic()
        if (draft, at_once) == (NONE, 1):
            self._references[is_deterministic] = outputs
        references = self._references[is_deterministic]
        found = [
            self._parting(job, reference, output, is_deterministic=is_deterministic)
            for job, reference, output in zip(jobs, references, outputs, strict=True)
        ]
        scored = time.monotonic()
        partings = [parting for parting in found if parting is not None]
        lengths = [
            len(output) if parting is None else parting.index + 1
            for output, parting in zip(outputs, found, strict=True)
        ]
        row = Row(
            deterministic=is_deterministic,
            draft=draft,
            at_once=at_once,
            outputs=len(outputs),
            tokens=sum(lengths),
            partings=len(partings),
            per_1000_tokens=1000 * len(partings) / sum(lengths),
            largest_gap=max((parting.gap for parting in partings), default=None),
            all_near_ties=all(parting.is_near_tie for parting in partings),
            seconds=served - started,
            scoring_seconds=scored - served,
        )
        report.rows.append(row)
        print(_line(row), flush=True)
        if not row.all_near_ties:
            report.problems.append(f"{_line(row)}: no near tie")
        if row.partings and (is_deterministic or report.dtype == "float32"):
            report.problems.append(f"{_line(row)}: none may part")

    def _parting(
        self, job: Sequence, reference: list[int], output: list[int], *, is_deterministic: bool
    ) -> Parting | None:
        """Looked up where another way parted at the same place with the same token."""
        index = next((i for i, pair in enumerate(zip(reference, output, strict=True)) if pair[0] != pair[1]), None)
        if index is None:
            return None
        key = (job.spec.job_id, is_deterministic, index, output[index])
        if key not in self._partings:
            self._partings[key] = self._scores.parting(job.spec.prompt, reference, output, job.spec.sampling)
        return self._partings[key]

    def _price(self, usual: LocalServing, deterministic: LocalServing, draft: str, at_once: int) -> None:
        started = time.monotonic()
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(self._rounds):
            for serving, is_deterministic in ((usual, False), (deterministic, True)):
                serving.timings.clear()
                serving.run(self._jobs(at_once, WINDOW_TOKENS)[:at_once], at_once=at_once)
                walls = [
                    timing.wall_ns
                    for timing in serving.timings
                    if timing.wall_ns is not None and timing.kind is not StepKind.PREFILL
                ]
                times[is_deterministic].append(median(walls) / 1000)
        ratio = median(with_it / without for without, with_it in zip(times[False], times[True], strict=True))
        price = Price(
            draft=draft,
            at_once=at_once,
            step_us=median(times[False]),
            deterministic_step_us=median(times[True]),
            ratio=ratio,
        )
        self._report.prices.append(price)
        print(
            f"draft {draft}, {at_once} at once: a deterministic step takes {ratio:.3f} of another "
            f"({time.monotonic() - started:.1f} s)",
            flush=True,
        )

    def _jobs(self, num_prompts: int, max_new_tokens: int) -> list[Sequence]:
        return [
            Sequence(
                SequenceSpec(
                    job_id=f"{prompt.id}, {name}",
                    prompt=tuple(self._tokenizer(prompt.text).input_ids),
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    stop_token_ids=frozenset(),
                )
            )
            for prompt in prompts()[:num_prompts]
            for name, sampling in SAMPLINGS.items()
        ]

    def _roles(self, draft: str, *, is_deterministic: bool) -> list[RoleEngine]:
        device, dtype = self._device, self._report.dtype
        width = NUM_DRAFT_TOKENS + 1 if is_deterministic else None
        roles = [make_verify(WorkerConfig(model=target_dir(), dtype=dtype, deterministic_width=width), device, 0)]
        model = DRAFTS[draft]
        if model is not None:
            config = WorkerConfig(model=model, algorithm=draft, target=target_dir(), dtype=dtype)
            roles.append(make_draft(config, device, 0))
        return roles

    def _config(self) -> SchedulerConfig:
        return SchedulerConfig(
            verify="unix:/none",
            num_draft_tokens=NUM_DRAFT_TOKENS,
            slots=TOGETHER,
            context_tokens=128 + self._report.max_new_tokens,
            kv_memory_mib=KV_MIB,
            queue=4096,
        )


def _mode(is_deterministic: bool) -> str:
    return "deterministic" if is_deterministic else "usual"


def _line(row: Row) -> str:
    gap = "" if row.largest_gap is None else f", gaps up to {row.largest_gap:.3f}"
    way = f"{_mode(row.deterministic)}, draft {row.draft}, {row.at_once} at once"
    return (
        f"{way}: {row.partings} partings of {row.outputs} outputs, {row.per_1000_tokens:.2f} in 1,000 of "
        f"{row.tokens} tokens{gap} ({row.seconds:.1f} s, and {row.scoring_seconds:.1f} s to judge them)"
    )


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    num_prompts: Annotated[int, typer.Option("--prompts", help="Held-out prompts, at most 64.")] = 40,
    num_deterministic_prompts: Annotated[
        int, typer.Option("--deterministic-prompts", help="The same where nothing may part.")
    ] = 16,
    tokens: Annotated[int, typer.Option(help="Of each output.")] = 200,
    limit: Annotated[float, typer.Option(help="Seconds after which no part begins.")] = LIMIT_S,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the results go, after each part.")] = None,
) -> None:
    """Compares, prices, and says whether all is as it should be."""
    chosen = choose_device(device)
    is_cpu = chosen.torch_device.type == CPU
    report = Report(
        host=host(chosen.torch_device.type),
        dtype=str(dtype_of(WorkerConfig(model=target_dir()), chosen)).removeprefix("torch."),
        bound=BOUND,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        num_prompts=num_prompts,
        num_deterministic_prompts=min(num_prompts, num_deterministic_prompts),
        samplings=list(SAMPLINGS),
        max_new_tokens=tokens,
    )
    print(f"{report.host}, {report.dtype}{' (a CPU is always deterministic)' if is_cpu else ''}", flush=True)
    NearTies(chosen, report, json_path, limit_s=limit).run()
    print(f"{report.seconds:.0f} s; problems: {'; '.join(report.problems) or 'none'}")
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
