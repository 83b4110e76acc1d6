"""Near ties: partings are counted and judged, by the scores that tokens are chosen by."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from slipstream.benchmarks.models import EAGLE3, NONE
from slipstream.benchmarks.near_ties import NearTies, Parting, Plan, Scores, problems_of, row_of
from slipstream.benchmarks.runner import Row
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_verify
from slipstream.services.worker.config import WorkerConfig
from tests.harness.checkpoints import write_checkpoint
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker

OUTPUTS = [[1, 2, 3, 4]] * 3
NEAR, FAR = Parting(1, 0.1), Parting(1, 0.3)


def row(*found: Parting | None, deterministic: bool = False) -> Row:
    """The row of three outputs."""
    return {"deterministic": deterministic, "draft": EAGLE3, "at_once": 8, **row_of(OUTPUTS, found), "seconds": 1.0}


def test_partings_are_counted_up_to_their_token() -> None:
    found = row(None, NEAR, Parting(0, 0.2))
    assert {name: found[name] for name in ("outputs", "tokens", "partings", "largest_gap")} == {
        "outputs": 3,
        "tokens": 4 + 2 + 1,
        "partings": 2,
        "largest_gap": 0.2,
    }
    assert found["per_1000_tokens"] == pytest.approx(2000 / 7)


@pytest.mark.parametrize(
    ("found", "deterministic", "dtype", "problems"),
    [
        ((None, None, None), True, "float32", []),
        ((None, NEAR, None), False, "bfloat16", []),
        ((None, NEAR, None), False, "float32", ["none may part"]),
        ((None, NEAR, None), True, "bfloat16", ["none may part"]),
        ((None, FAR, None), False, "bfloat16", ["no near tie"]),
        ((None, FAR, None), True, "bfloat16", ["no near tie", "none may part"]),
    ],
)
def test_partings_that_rounding_does_not_explain_are_problems(
    found: tuple[Parting | None, ...], deterministic: bool, dtype: str, problems: list[str]
) -> None:
    said = problems_of(row(*found, deterministic=deterministic), dtype)
    assert [problem.rpartition(": ")[2] for problem in said] == problems


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_in_float32_nothing_parts_and_what_parts_is_told(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    measurement = NearTies(Plan(device="cpu", prompts=1, max_new_tokens=10, rounds=1), path)
    for draft in (NONE, EAGLE3):
        await measurement.measure(draft)
    report = json.loads(path.read_text(encoding="utf-8"))
    assert not report["problems"]
    assert [(row["deterministic"], row["draft"], row["at_once"]) for row in report["rows"]] == [
        (deterministic, draft, at_once)
        for draft in (NONE, EAGLE3)
        for deterministic in (False, True)
        for at_once in (1, 8)
    ]
    counts = [[row[name] for name in ("outputs", "tokens", "partings", "largest_gap")] for row in report["rows"]]
    assert counts == [[3, 30, 0, None]] * 8
    assert all(0.2 < price["ratio"] < 5 and price["step_us"] > 0 for price in report["prices"])
    assert len(report["prices"]) == 4
    for outputs in measurement.references.values():
        first = outputs[0]
        outputs[0] = [*first[:4], (first[4] + 1) % 4096, *first[5:]]
    await measurement.measure(EAGLE3)
    usual = [row for row in measurement.report["rows"][8:] if not row["deterministic"]]
    assert [(row["partings"], row["tokens"]) for row in usual] == [(1, 25), (1, 25)]
    assert all(row["largest_gap"] > 0 for row in usual)
    assert sum("none may part" in problem for problem in measurement.report["problems"]) == 4


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=2**64 - 5)])
def test_the_best_score_is_the_token_that_was_chosen(sampling: SamplingParams, tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", seed=3)
    rng = random.Random(3)
    spec = SequenceSpec(
        job_id="a",
        prompt=tuple(rng.randrange(256) for _ in range(9)),
        max_new_tokens=12,
        sampling=sampling,
        stop_token_ids=frozenset(),
    )
    worker = LocalWorker(make_verify(WorkerConfig(model=target), HostDevice(), 0))
    config = SchedulerConfig(verify="unix:/none", slots=1, context_tokens=64)
    job = Job(spec)
    output = LocalEpoch(1, config, [worker]).run([job])[job]
    worker.close()
    scores = Scores(target)
    for index, token in enumerate(output):
        assert int(scores.at_end([*spec.prompt, *output[:index]], sampling).argmax()) == token
    assert scores.parting(spec.prompt, output, output, sampling) is None
    changed = [*output[:4], (output[4] + 1) % 256, *output[5:]]
    parting = scores.parting(spec.prompt, output, changed, sampling)
    assert parting is not None
    assert parting.index == 4
    at_parting = scores.at_end([*spec.prompt, *output[:4]], sampling)
    assert parting.gap == pytest.approx(float(at_parting[output[4]] - at_parting[changed[4]]))
    assert torch.isfinite(at_parting).all()
