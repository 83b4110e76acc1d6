"""A draft's process that writes random bytes over all that it maps, all the time: it costs acceptance, and no token."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from slipstream.common.wire.step import Role
from slipstream.scheduler.metrics import OVERLAP_EFFICIENCY
from tests.harness.checkpoints import write_checkpoint
from tests.harness.eagle3_checkpoints import write_head
from tests.harness.hostile_draft import HOLD, hostile_program
from tests.harness.sampling import examples
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session
from tests.scheduler.test_session import SEED, make_jobs, settings

pytestmark = pytest.mark.timeout(120)
NUM_JOBS = 6
MAX_NEW_TOKENS = 100
NUM_WRITES = examples(300, sampled=100)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["standalone", "eagle3"])
async def test_no_token_changes(tmp_path: Path, algorithm: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    target, writes = write_checkpoint(tmp_path / "target", seed=SEED), tmp_path / "writes"
    # As a draft, the target itself would always be right.
    draft = write_head(tmp_path / "head") if algorithm == "eagle3" else target
    programs = {Role.DRAFT: (*hostile_program(seed, writes), "--algorithm", algorithm)}
    with (
        WorkerProcesses(tmp_path, {Role.VERIFY: target, Role.DRAFT: draft}, programs=programs) as processes,
        running_session(processes, **settings(debug=False)) as client,
    ):
        processes.start(Role.VERIFY)
        await client.served(with_draft=False)
        expected = await client.run(*make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS))
        processes.start(Role.DRAFT)
        await until(writes.exists)
        num_accepted = num_acceptable = 0
        # Until its draft tokens are used, and most of them are wrong: the test's time bounds it.
        while num_accepted >= num_acceptable / 2 or int(writes.read_text() or 0) < NUM_WRITES:
            jobs = make_jobs(NUM_JOBS, max_new_tokens=MAX_NEW_TOKENS)
            assert await client.run(*jobs) == expected
            num_accepted += sum(job.stats.total_accepted_tokens for job in jobs)
            num_acceptable += sum(job.stats.total_draft_tokens for job in jobs)
        assert client.num_epochs == 1
        assert client.errors == client.reasons == []
        assert client.metric("slipstream_draft_attachments_total") > 0
        samples = [sample for family in client.registry.collect() for sample in family.samples]
        wrong = [sample for sample in samples if not (math.isfinite(sample.value) and sample.value >= 0)]
        # NaN by design where the last steps are long ago, as those without a draft are on a slow machine.
        wrong = [
            sample for sample in wrong if not (sample.name == OVERLAP_EFFICIENCY.name and math.isnan(sample.value))
        ]
        assert not wrong


@pytest.mark.slow
async def test_a_draft_that_holds_its_fence_at_zero_costs_the_watchdogs_time(tmp_path: Path) -> None:
    """The scheduler's release in that word is overwritten at once."""
    target, writes = write_checkpoint(tmp_path / "target", seed=SEED), tmp_path / "writes"
    programs = {Role.DRAFT: hostile_program(HOLD, writes)}
    with (
        WorkerProcesses(tmp_path, {Role.VERIFY: target, Role.DRAFT: target}, programs=programs) as processes,
        running_session(processes, **settings(draft_timeout_ms=300.0, step_timeout_s=20.0)) as client,
    ):
        processes.start(Role.VERIFY)
        await client.served(with_draft=False)
        expected = await client.run(*make_jobs(NUM_JOBS))
        processes.start(Role.DRAFT)
        # It takes part at once while nothing runs; else it would have to take in tokens, and never seems to.
        # Now and then it is too late, and drafts: on a busy machine its threads take turns.
        while not client.metric("slipstream_draft_losses_total", cause="timeout"):
            await client.served()
            assert await client.run(*make_jobs(NUM_JOBS)) == expected
        assert writes.exists()
        assert client.num_epochs == 1
        assert client.errors == client.reasons == []
