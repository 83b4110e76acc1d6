"""A draft that writes whatever it likes, whenever it likes: it costs acceptance, and changes no token."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.common.device.cpu.device import HostArena, HostDevice
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.step import Role
from slipstream.common.wire.worker import Attachment, Measurements
from slipstream.services.factory import make_draft
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.counted_jobs import Job
from tests.harness.eagle3_checkpoints import make_head
from tests.harness.local_epoch import LocalEpoch, Way
from tests.harness.sampling import examples
from tests.harness.seeded_jobs import adjusted_jobs, make_jobs
from tests.harness.workers import LocalWorker, local_workers

PAUSE_S = 0.0003
"""Between two scribbles, at most: many in a step."""
_FLOATS = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 0.0)
_TOKENS = (-1, -(2**63), 2**63 - 1, 2**31, 0, 271, 272)


class Vandal(LocalWorker):
    """A draft beside which another thread scribbles over all that a draft writes, and over the states that it reads."""

    def __init__(self, role: RoleEngine, seed: int) -> None:
        super().__init__(role)
        self.num_scribbles = 0
        self._rng = random.Random(seed)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, attachment: Attachment) -> Measurements | None:
        """See `LocalWorker.attach`."""
        arena = HostArena.open(attachment.manifest)
        measured = super().attach(attachment)
        self._thread = threading.Thread(target=self._scribble, args=(arena,))
        self._thread.start()
        return measured

    def detach(self, *, drain: bool) -> None:
        """See `LocalWorker.detach`."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        super().detach(drain=drain)

    def _scribble(self, arena: HostArena) -> None:
        names = (BufferName.DRAFT_TOKENS, BufferName.HIDDEN_STATES, BufferName.PREFILL_HIDDEN)
        there = {placed.spec.name for placed in arena.manifest.buffers}
        rows = [row for name in names if name in there for row in arena.tensor(name).unbind()]
        rng, generator = self._rng, torch.Generator().manual_seed(self._rng.getrandbits(32))
        while not self._is_over.wait(rng.random() * PAUSE_S):
            row = rng.choice(rows)
            if rng.randrange(2):
                row.fill_(rng.choice(_FLOATS if row.is_floating_point() else _TOKENS))
            elif row.is_floating_point():
                row.copy_(torch.randn(row.shape, generator=generator))
            else:
                row.random_(-(2**63), None, generator=generator)
            self.num_scribbles += 1
        arena.close()


def serve_plainly(verify: RoleEngine, jobs: list[Job]) -> list[list[int]]:
    """Plain decoding, one request at a time, nothing runs ahead."""
    with local_workers(verify) as workers:
        outputs = LocalEpoch(1, Way(run_ahead=0, slots=1).config(None), workers).run(*([job] for job in jobs))
    return [outputs[job] for job in jobs]


@pytest.fixture(scope="module")
def plain(verify: RoleEngine) -> list[list[int]]:
    """Jobs without penalties."""
    return serve_plainly(verify, make_jobs(8))


@pytest.fixture(scope="module")
def reference(verify: RoleEngine, plain: list[list[int]]) -> list[list[int]]:
    """Plain requests, and others with penalties, bias and masks."""
    return plain + serve_plainly(verify, adjusted_jobs(plain))


@pytest.fixture(scope="module", params=["standalone", "eagle3"])
def draft(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> RoleEngine:
    """A draft that would be right all the time, and one that reads the target's states."""
    if request.param == "eagle3":
        return make_head(tmp_path_factory.mktemp("models") / "head", target)
    return make_draft(WorkerConfig(model=target), HostDevice(), 0)


@pytest.mark.sampled(1)
def test_no_token_changes(
    verify: RoleEngine, draft: RoleEngine, plain: list[list[int]], reference: list[list[int]]
) -> None:
    accepted, acceptable = [], []

    @settings(max_examples=examples(6, sampled=1), suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32), run_ahead=st.integers(0, 2), num_draft_tokens=st.sampled_from([1, 2, 4]))
    def vandalise(seed: int, run_ahead: int, num_draft_tokens: int) -> None:
        vandal, worker, jobs = Vandal(draft, seed), LocalWorker(verify), make_jobs(8) + adjusted_jobs(plain)
        assert vandal.role is Role.DRAFT
        config = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead, slots=3).config(None)
        outputs = LocalEpoch(1, config, [worker, vandal]).run(jobs)
        for each in (vandal, worker):
            each.close()
            assert not each.failures
        assert vandal.num_scribbles > 20
        assert [outputs[job] for job in jobs] == reference
        accepted.append(sum(job.stats.total_accepted_tokens for job in jobs))
        bounds = [
            num_draft_tokens if job.spec.max_draft_tokens is None else min(job.spec.max_draft_tokens, num_draft_tokens)
            for job in jobs
        ]
        acceptable.append(sum(job.stats.num_verify_steps * bound for job, bound in zip(jobs, bounds, strict=True)))

    vandalise()
    assert sum(accepted) < sum(acceptable), "what was scribbled was used"
