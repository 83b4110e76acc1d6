"""The state of a server and the usage of a job, for tests that need one of each."""

from __future__ import annotations

from slipstream.common.wire.job import Usage
from slipstream.common.wire.server import ServerState, ServiceState

TOKENS_PER_STEP = 3
VOCAB_SIZE = 350
CONTEXT_TOKENS = 4096

STATE = ServerState(
    version="1.2.3",
    model="tiny",
    vocab_size=VOCAB_SIZE,
    context_tokens=CONTEXT_TOKENS,
    algorithm="standalone",
    num_draft_tokens=TOKENS_PER_STEP - 1,
    run_ahead=1,
    num_slots=16,
    page_tokens=16,
    num_pages=100,
    num_free_pages=99,
    queue_capacity=8,
    num_waiting=1,
    num_running=2,
    epoch=2**40,
    services=(
        ServiceState(name="scheduler", address="unix:/s", pid=10, metrics_port=11),
        ServiceState(name="verify", address="unix:/a", pid=12, model="tiny", device="cpu"),
    ),
    fence="timeline",
    served_names=("tiny",),
)
USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=5,
    total_draft_tokens=8,
    total_accepted_tokens=3,
    num_verify_steps=2,
    mean_accept_length=2.5,
    accepted_per_position=(2, 1, 0, 0),
    seed=2**64 - 1,
    queue_seconds=0.25,
    time_to_first_token_seconds=0.5,
    end_to_end_seconds=2.5,
    mean_inter_token_latency_seconds=0.5,
    cached_tokens=2,
)
