"""Jobs as they come back from the journal of a gateway that died at a bad moment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from slipstream.client import AsyncClient
from slipstream.common.errors import InternalError
from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec, StepOutput
from slipstream.gateway.job import Job
from slipstream.gateway.journal import JobJournal, output_of, record_of, rows_of
from slipstream.gateway.journal_file import Accepted, JournalFile, JournalMode
from slipstream.gateway.metrics import RequestMetrics
from slipstream.gateway.request import CheckedRequest
from slipstream.gateway.sample import Sample
from slipstream.protos import journal_pb2
from tests.harness.generation_server import collect, generation_server, killed, model_of, tokens_of
from tests.harness.scripted_scheduler import DESCRIPTION

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_job_ends_as_cancelled_only_if_a_client_cancelled_it(tmp_path: Path, is_cancelled: bool) -> None:
    """The end of a job whose caller left is kept with a step, its cause later: it goes on when the caller is back."""
    spec = SequenceSpec(
        job_id="a", prompt=(70,), max_new_tokens=9, sampling=SamplingParams(), stop_token_ids=frozenset()
    )
    model = model_of(DESCRIPTION)
    request = CheckedRequest(job_id="a", digest=b"a", samples=(spec,))
    job = Job(request, model, number=1, attempt=1)
    job.is_cancelled = is_cancelled
    last = StepOutput(
        sequences=[7],
        num_tokens=[1],
        num_accepted=[0],
        finish_reasons=[FinishReason.ABORT],
        tokens=[71],
        published_ns=1,
        is_beyond_draft=[True],
        admitted=[7],
        admitted_ns=[time.monotonic_ns()],
        cached_tokens={7: 1},
    )
    file = JournalFile.open(tmp_path / "journal", JournalMode.PROCESS)
    file.commit([Accepted(1, record_of(job))], [rows_of(last, {7: job.samples[0].key})])
    metrics = RequestMetrics(CollectorRegistry(), num_running=lambda: 0, num_waiting=lambda: 0)
    journal = JobJournal(file, jobs=tuple, metrics=metrics, on_failure=lambda error: pytest.fail(str(error)))
    ((restored, _),) = await journal.restore(model)
    await journal.close()
    assert (restored.is_over, restored.num_tokens) == (True, 1)
    assert restored.can_go_on != is_cancelled
    (sample,) = restored.samples
    assert (sample.tokens_beyond_draft, sample.cached_tokens) == (1, 1)
    assert sample.admitted_at == pytest.approx(time.monotonic(), abs=60)
    assert journal_pb2.JournaledOutput.FromString(output_of(restored)).samples[0].tokens_beyond_draft == 1


@pytest.mark.parametrize("is_over", [True, False])
async def test_output_that_cannot_become_text_fails_its_own_job_at_the_start(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.sqlite3"
    async with generation_server(journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = None if is_over else 9
        for name in ("broken", "whole"):
            await client.create_job([70, 71], job_id=name, max_new_tokens=20, stop=["#"])
        while not all(job.is_over or (not is_over and job.num_tokens >= 9) for job in (await client.list_jobs()).jobs):
            pass
        await server.manager.journal.flush()
        left = killed(path)
    detokenize = Sample.detokenize

    def break_one(sample: Sample, end: int) -> None:
        if sample.spec.job_id == "broken":
            raise OverflowError("no token has this number")
        detokenize(sample, end)

    monkeypatch.setattr(Sample, "detokenize", break_one)
    async with generation_server(journal=left) as server, AsyncClient(server.address) as client:
        assert tokens_of(await collect(client.watch_job("whole"))) == [70, 71] * 10
        with pytest.raises(InternalError, match="could not be taken in"):
            await collect(client.watch_job("broken"))
        broken = await client.get_job("broken")
        assert (broken.is_over, "could not be taken in" in broken.error) == (True, True)
        assert server.manager.num_jobs == 0
