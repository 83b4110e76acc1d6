"""A draft's process that writes random bytes over all that it maps of the GPU's memory: no token changes."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from slipstream.bundled import dflash_dir, eagle3_dir, mtp_dir, prompts, standalone_dir, target_dir
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import Role
from slipstream.services.models.head_config import DFLASH, EAGLE3, MTP
from slipstream.services.worker.config import STANDALONE
from tests.harness.counted_jobs import Job
from tests.harness.hostile_draft import hostile_program
from tests.harness.waiting import until
from tests.harness.worker_processes import WorkerProcesses, running_session

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice

DRAFTS = {STANDALONE: standalone_dir(), EAGLE3: eagle3_dir(), MTP: mtp_dir(), DFLASH: dflash_dir()}
NUM_JOBS = 8
MAX_NEW_TOKENS = 200
NUM_WRITES = 2000
MOST_ACCEPTED = 0.7
"""Share of a round's drafted tokens that shows that writes were used: of an honest draft's, 0.78 are accepted."""
SIZES = {"slots": 4, "fixed_draft_tokens": 4, "context_tokens": 512, "kv_memory_mib": 256}


def make_jobs() -> list[Job]:
    """Held-out prompts, greedy and sampled in turn."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir())
    return [
        Job(
            SequenceSpec(
                job_id=prompt.id,
                prompt=tuple(tokenizer(prompt.text).input_ids),
                max_new_tokens=MAX_NEW_TOKENS,
                sampling=SamplingParams(temperature=0.8 * (number % 2), seed=number),
                stop_token_ids=frozenset(),
            )
        )
        for number, prompt in enumerate(prompts()[:NUM_JOBS])
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", DRAFTS)
async def test_no_token_changes(tmp_path: Path, device: CudaDevice, algorithm: str) -> None:
    """Rows of one width in float32: what is computed of a token does not depend on the draft, or on its absence.

    With the fences that can be released: for the others a draft that holds a step up costs the epoch.
    """
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    writes, width = tmp_path / "writes", str(SIZES["fixed_draft_tokens"] + 1)
    target = ("--target", str(target_dir())) if algorithm != STANDALONE else ()
    programs = {
        Role.VERIFY: ("-m", "slipstream.services.verify_main", "--deterministic-width", width),
        Role.DRAFT: (*hostile_program(seed, writes), "--algorithm", algorithm, *target),
    }
    models = {Role.VERIFY: target_dir(), Role.DRAFT: DRAFTS[algorithm]}
    options = ("--device", "cuda", "--dtype", "float32")
    with (
        WorkerProcesses(tmp_path, models, *options, programs=programs) as processes,
        running_session(processes, device=device, no_prefix_cache=True, **SIZES) as client,
    ):
        processes.start(Role.VERIFY)
        await client.served(with_draft=False)
        expected = await client.run(*make_jobs())
        processes.start(Role.DRAFT)
        await until(writes.exists)
        accepted = 1.0
        # On a GPU it writes long before its graphs are captured and it takes part; then until its writes were used.
        while accepted > MOST_ACCEPTED or int(writes.read_text() or 0) < NUM_WRITES:
            jobs = make_jobs()
            assert await client.run(*jobs) == expected
            if num_acceptable := sum(job.stats.total_draft_tokens for job in jobs):
                accepted = min(accepted, sum(job.stats.total_accepted_tokens for job in jobs) / num_acceptable)
        assert client.num_epochs == 1
        assert client.errors == client.reasons == []
        assert client.metric("slipstream_draft_attachments_total") > 0
        samples = [sample for family in client.registry.collect() for sample in family.samples]
        assert all(math.isfinite(sample.value) and sample.value >= 0 for sample in samples), samples
