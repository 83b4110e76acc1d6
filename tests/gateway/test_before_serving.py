"""A gateway that was started again, before its link to the scheduler serves: each call says when to come back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from slipstream.bundled import target_dir
from slipstream.client import Client
from slipstream.common.errors import UnavailableError
from slipstream.common.rpc.status import error_from_rpc
from slipstream.protos import generation_pb2 as pb
from slipstream.protos import generation_pb2_grpc
from tests.harness.gateway_processes import TIMEOUT_S, gateway_processes
from tests.harness.scripted_scheduler import DESCRIPTION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = pb.TokenIds(ids=[5, 6, 7])


def calls_of(channel: grpc.Channel, *, has_jobs: bool) -> Iterator[tuple[str, Any]]:
    """Every call that needs a scheduler, or the jobs that come back with it."""
    stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
    engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    resume = pb.Resume(from_tokens=[3], attempt=17)
    yield "Generate", lambda: list(stub.Generate(pb.GenerateRequest(input_ids=PROMPT)))
    yield "Generate of a text", lambda: list(stub.Generate(pb.GenerateRequest(text="a" * 5000)))
    yield "Generate again", lambda: list(stub.Generate(pb.GenerateRequest(job_id="a", input_ids=PROMPT, resume=resume)))
    yield "CreateJob", lambda: stub.CreateJob(pb.CreateJobRequest(job_id="a", input_ids=PROMPT))
    yield "GetServerInfo", lambda: stub.GetServerInfo(pb.GetServerInfoRequest())
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=[5])
    yield "vLLM's Generate", lambda: list(engine.Generate(vllm_engine_pb2.GenerateRequest(tokenized=tokenized)))
    yield "vLLM's GetModelInfo", lambda: engine.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    yield "vLLM's HealthCheck", lambda: engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    if has_jobs:
        # Without a journal these jobs are lost, and that is the answer.
        yield "WatchJob", lambda: list(stub.WatchJob(pb.WatchJobRequest(job_id="a", from_token=3)))
        yield "GetJob", lambda: stub.GetJob(pb.GetJobRequest(job_id="a"))
        yield "ListJobs", lambda: stub.ListJobs(pb.ListJobsRequest())
        yield "CancelJob", lambda: stub.CancelJob(pb.CancelJobRequest(job_id="a"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_jobs", [True, False])
def test_every_call_is_unavailable_with_the_time_to_come_back(tmp_path: Path, has_jobs: bool) -> None:
    tmp_path.chmod(0o700)
    journal = ("--state-dir", str(tmp_path)) if has_jobs else ()
    with gateway_processes(tmp_path, 1, *journal) as gateways:
        with Client(gateways.addresses[0]) as client:
            gateways.scheduler.pause_tokens = 3
            client.create_job([5, 6, 7], job_id="a", max_new_tokens=9)
        gateways.kill(0)
        gateways.scheduler.pause()
        gateways.start(0)
        with grpc.insecure_channel(gateways.addresses[0]) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            for name, call in calls_of(channel, has_jobs=has_jobs):
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                error = error_from_rpc(refused.value)
                assert type(error) is UnavailableError, (name, error)
                assert error.retry_after_ms, name
        gateways.scheduler.pause_tokens = None
        gateways.scheduler.serve(replace(DESCRIPTION, tokenizer_path=str(target_dir())))
        with Client(gateways.addresses[0]) as client:
            text = list(client.generate([5, 6, 7], job_id="a", max_new_tokens=9))
            assert [token for chunk in text for token in chunk.token_ids] == [5, 6, 7] * 3
