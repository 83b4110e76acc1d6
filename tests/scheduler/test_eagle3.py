"""Heads on real engines and streams: the target's tokens, whatever the head, and in order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import MismatchError
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.counted_jobs import Job
from tests.harness.eagle3_checkpoints import AUTHORS, BLOCKS, LAYOUTS, MODULES, make_head, write_head
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import adjusted_jobs, make_jobs
from tests.ordering.replay import Replay

pytestmark = pytest.mark.sampled_module(3)


WAYS = [
    Way(num_draft_tokens=4, run_ahead=0, chunk_tokens=3),
    Way(num_draft_tokens=1, run_ahead=1, slots=2, chunk_tokens=1),
    Way(num_draft_tokens=3, run_ahead=2, slots=3),
    Way(num_draft_tokens=4, run_ahead=1, chunk_tokens=64, debug=False),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [*LAYOUTS, MODULES, BLOCKS])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_are_the_targets_and_nothing_collides(
    verify: RoleEngine, target: Path, reference: list[list[int]], tmp_path: Path, way: Way, layout: str
) -> None:
    head = make_head(tmp_path / "head", target, layout)
    logs = tmp_path / "logs"
    logs.mkdir()
    together, alone = make_jobs(), make_jobs()
    outputs = Served(Models(verify, head, head), way, log_dir=logs).run(together, *([job] for job in alone))
    assert outputs == reference * 2
    report = Replay(logs).report()
    assert not report.races
    assert not report.stuck
    for one, other in zip(together, alone, strict=True):
        # A head's guesses depend on its keys and values alone: not on the batch or how its prompt was cut.
        assert one.stats.total_accepted_tokens == other.stats.total_accepted_tokens


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [AUTHORS, BLOCKS])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8])
def test_how_a_prompt_is_cut_changes_no_guess(
    verify: RoleEngine, tmp_path: Path, target: Path, chunk_tokens: int, layout: str
) -> None:
    head = make_head(tmp_path / "head", target, layout)
    counts = []
    for size in (chunk_tokens, 64):
        jobs = make_jobs(10)
        Served(Models(verify, head, head), Way(num_draft_tokens=4, chunk_tokens=size)).run(jobs)
        counts.append([(job.stats.num_verify_steps, job.stats.total_accepted_tokens) for job in jobs])
    assert counts[0] == counts[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [AUTHORS, BLOCKS])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_requests_with_penalties_masks_logprobs_and_bounds(
    verify: RoleEngine, target: Path, tmp_path: Path, run_ahead: int, layout: str
) -> None:
    """Requests of one batch, each with other settings; steps turn plain when no request is left that speculates."""
    plain = Served(Models(verify, verify, verify), Way(run_ahead=0)).run(make_jobs(8))
    alone = Served(Models(verify, verify, verify), Way(run_ahead=0, slots=1)).run(*([j] for j in adjusted_jobs(plain)))
    jobs = adjusted_jobs(plain)
    for job in jobs[::3]:
        job.spec = replace(job.spec, top_logprobs=4)
    logs, head = tmp_path / "logs", make_head(tmp_path / "head", target, layout)
    logs.mkdir()
    way = Way(num_draft_tokens=3, run_ahead=run_ahead, slots=2)
    assert Served(Models(verify, head, head), way, log_dir=logs).run(jobs) == alone
    assert sum(job.stats.total_accepted_tokens for job in jobs) > 0
    report = Replay(logs).report()
    assert not report.races
    assert not report.stuck
    accesses = "".join(path.read_text() for path in logs.glob("*.jsonl"))
    assert "top_logprobs" in accesses, "they were published, and read behind the same fence"


def test_layers_that_the_target_does_not_have_are_refused(verify: RoleEngine, tmp_path: Path) -> None:
    path = write_head(tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    head = make_draft(WorkerConfig(model=path, algorithm=EAGLE3), HostDevice(), 0)
    served = Served(Models(verify, head, head), Way(num_draft_tokens=2))
    with pytest.raises(MismatchError, match="layers to fuse"):
        served.run(make_jobs(1))
    served.close()


def test_the_bundled_head_is_right_more_often_than_not() -> None:
    device, target = HostDevice(), bundled.target_dir()
    verify = make_verify(WorkerConfig(model=target), device, 0)
    head = make_draft(WorkerConfig(model=bundled.eagle3_dir(), target=target, algorithm=EAGLE3), device, 0)
    jobs = [
        Job(
            SequenceSpec(
                job_id=str(number),
                prompt=tuple(range(300 * number, 300 * number + 20)),
                max_new_tokens=48,
                sampling=SamplingParams(temperature=0.8, seed=number),
                stop_token_ids=frozenset(),
            )
        )
        for number in range(1, 5)
    ]
    Served(Models(verify, head, head), Way(num_draft_tokens=4, page_tokens=16)).run(jobs)
    steps = sum(job.stats.num_verify_steps for job in jobs)
    assert 1 + sum(job.stats.total_accepted_tokens for job in jobs) / steps > 2
