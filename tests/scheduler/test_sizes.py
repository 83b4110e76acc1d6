"""The sizes of an epoch."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import ConfigError, MismatchError, OutOfMemoryError
from slipstream.common.wire.layout import ring_rows
from slipstream.common.wire.manifest import EVENTS
from slipstream.common.wire.step import Role
from slipstream.common.wire.worker import DeviceMemory
from slipstream.scheduler import sizes as scheduler_sizes
from slipstream.scheduler.attachment import check_fits
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.sizes import EpochSizes, Workers, check_draft_memory
from tests.harness.workers import describe

VERIFY = describe(Role.VERIFY, max_context_tokens=800, kv_bytes_per_token=1024)
DRAFT = describe(Role.DRAFT, max_context_tokens=200, kv_bytes_per_token=256)
BOTH = Workers(verify=VERIFY, draft=DRAFT)
CONFIG = SchedulerConfig(
    verify="unix:/v",
    slots=4,
    page_tokens=10,
    fixed_draft_tokens=4,
    run_ahead=1,
    kv_memory_mib=512,
    max_batched_tokens=512,
)


def test_no_more_pages_than_the_slots_can_use() -> None:
    sizes = EpochSizes.decide(CONFIG, BOTH)
    # 800 tokens of context, and 2 steps of 5 tokens that may run ahead: 81 pages a slot, and the padding page.
    assert sizes.context_tokens == 800
    assert sizes.batch.pages_for(800) == 81
    assert sizes.batch.num_pages == 4 * 81 + 1
    assert sizes.batch.num_slots == 5


def test_fences_have_events_for_the_longest_run_ahead() -> None:
    with pytest.raises(ConfigError, match="run_ahead"):
        replace(CONFIG, run_ahead=9)
    sizes = EpochSizes.decide(replace(CONFIG, run_ahead=8), BOTH)
    assert ring_rows(sizes.batch.run_ahead) <= EVENTS


def test_no_more_pages_than_the_memory_holds() -> None:
    sizes = EpochSizes.decide(replace(CONFIG, kv_memory_mib=2), BOTH)
    assert sizes.batch.num_pages == 2 * 2**20 // (10 * 1280)


def test_memory_for_less_than_one_request_is_refused_with_what_it_takes() -> None:
    config = replace(CONFIG, kv_memory_mib=1)
    with pytest.raises(ConfigError, match=r"kv_memory_mib: got 1, accepted: at least 2, .* 800 tokens"):
        EpochSizes.decide(config, BOTH)
    EpochSizes.decide(replace(config, kv_memory_mib=2), BOTH)


def test_context_is_what_verify_was_made_for_whatever_a_draft_was() -> None:
    assert EpochSizes.decide(CONFIG, Workers(verify=VERIFY, draft=None)).context_tokens == 800
    assert EpochSizes.decide(replace(CONFIG, context_tokens=100), BOTH).context_tokens == 100
    with pytest.raises(ConfigError, match="context_tokens: got 900, accepted: at most 800"):
        EpochSizes.decide(replace(CONFIG, context_tokens=900), BOTH)


def test_without_a_draft_its_pages_cost_nothing() -> None:
    sizes = EpochSizes.decide(replace(CONFIG, kv_memory_mib=2), Workers(verify=VERIFY, draft=None))
    assert sizes.batch.num_draft_tokens == 4, "one may come"
    assert sizes.batch.num_pages == 2 * 2**20 // (10 * 1024)


def test_a_chunk_is_no_longer_than_the_context() -> None:
    assert EpochSizes.decide(replace(CONFIG, context_tokens=100), BOTH).batch.chunk_tokens == 100


def test_chunks_and_pages_are_larger_on_a_gpu() -> None:
    config = replace(CONFIG, max_batched_tokens=None, page_tokens=None, memory_reserve_mib=0)
    longest, gib = 4096, 2**30
    on_host = replace(VERIFY, max_context_tokens=longest)
    on_gpu = replace(on_host, memory=DeviceMemory(total=16 * gib, free=16 * gib))
    given = replace(config, max_batched_tokens=100, page_tokens=8)
    for verify, expected in ((on_host, (512, 16)), (on_gpu, (2048, 64))):
        for settings, sizes in ((config, expected), (given, (100, 8))):
            batch = EpochSizes.decide(settings, Workers(verify=verify, draft=None)).batch
            assert (batch.chunk_tokens, batch.page_tokens) == sizes


def test_a_gpu_without_memory_for_large_chunks_takes_small_ones() -> None:
    config = replace(CONFIG, max_batched_tokens=None, kv_memory_mib=None, memory_reserve_mib=0)

    def chunk_tokens(free_mib: int) -> int:
        memory = DeviceMemory(total=free_mib * MIB, free=free_mib * MIB, work_per_token=MIB // 16)
        verify = replace(VERIFY, max_context_tokens=4096, memory=memory)
        return EpochSizes.decide(config, Workers(verify=verify, draft=None)).batch.chunk_tokens

    # 4 MiB of KV and a little for one request, and a 16th for each token of a step.
    assert chunk_tokens(512 + 10) == chunk_tokens(128 + 5) == 2048
    assert chunk_tokens(128) == 512
    with pytest.raises(OutOfMemoryError, match="36 MiB are needed and 32 MiB"):
        chunk_tokens(32)


@pytest.mark.parametrize(
    ("about", "free_mib", "expected"),
    [
        ({}, 900, 8192),
        ({}, 60, 2048),
        ({"takes_even_steps": False}, 900, 2048),
    ],
)
def test_chunks_are_larger_still_where_that_takes_few_pages(
    about: dict[str, bool], free_mib: int, expected: int
) -> None:
    """Tokens of a step take 1 KiB each; verify whose steps have one size pads each step to it."""
    config = replace(CONFIG, max_batched_tokens=None, kv_memory_mib=None, memory_reserve_mib=0, slots=1000)
    memory = DeviceMemory(total=free_mib * MIB, free=free_mib * MIB, work_per_token=1024)
    even = {"takes_even_steps": True, "max_context_tokens": 2**14, "memory": memory}
    verify = replace(VERIFY, **{**even, **about})
    batch = EpochSizes.decide(config, Workers(verify=verify, draft=None)).batch
    assert batch.chunk_tokens == expected


def test_hidden_states_must_be_as_wide_as_draft_reads_them() -> None:
    device, head = HostDevice(), replace(DRAFT, hidden_width=96)
    check_fits(device, replace(VERIFY, hidden_width=96), DRAFT)
    check_fits(device, replace(VERIFY, hidden_width=96), head)
    with pytest.raises(MismatchError, match="draft reads 96, verify writes 64"):
        check_fits(device, replace(VERIFY, hidden_width=64), head)


def test_workers_that_say_they_cost_nothing_are_no_reason_to_fail() -> None:
    free = Workers(verify=replace(VERIFY, kv_bytes_per_token=0), draft=None)
    assert EpochSizes.decide(CONFIG, free).batch.num_pages == 4 * 81 + 1


MIB = 2**20
MEMORY = DeviceMemory(
    total=1000 * MIB,
    free=600 * MIB,
    weights=100 * MIB,
    work=40 * MIB,
    work_per_token=MIB // 32,
    work_per_choice=MIB // 32,
)
ON_GPU = Workers(
    verify=replace(VERIFY, memory=replace(MEMORY, free=400 * MIB)),
    # What is free is verify's word.
    draft=replace(DRAFT, memory=replace(MEMORY, free=1, weights=50 * MIB, work=20 * MIB)),
)
GPU_CONFIG = replace(CONFIG, kv_memory_mib=None, memory_reserve_mib=100, slots=1000)
# 1000 slots with 5 tokens each, that are all chosen: 2 * 5000 / 16 MiB.
WORK_MIB = 60 + 625


def test_on_a_gpu_pages_take_what_the_others_leave() -> None:
    few = replace(GPU_CONFIG, slots=16)
    sizes = EpochSizes.decide(few, replace_free(206))
    # The largest steps have 512 prompt tokens, and 80 that are chosen: 2 * (512 + 80) / 32 MiB.
    assert sizes.batch.num_pages == (206 - 100 - 60 - 37) * MIB // (10 * 1280)
    with_less_reserve = EpochSizes.decide(replace(few, memory_reserve_mib=99), replace_free(206))
    assert with_less_reserve.batch.num_pages == 10 * MIB // (10 * 1280)


def test_a_gpu_that_is_too_small_is_refused_with_what_takes_how_much() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        EpochSizes.decide(GPU_CONFIG, ON_GPU)
    message = str(caught.value)
    assert f"{WORK_MIB + 100 + 1} MiB are needed and 400 MiB of 1000 MiB are free" in message
    for part in ("KV pages 2 MiB", f"steps {WORK_MIB} MiB", "reserve 100 MiB", "100 MiB (verify) and 50 MiB (draft)"):
        assert part in message


def test_pages_that_were_asked_for_must_fit_as_well() -> None:
    config = replace(GPU_CONFIG, slots=100, kv_memory_mib=300)
    with pytest.raises(OutOfMemoryError, match="KV pages 99 MiB"):
        EpochSizes.decide(config, replace_free(150))
    assert EpochSizes.decide(config, ON_GPU).batch.num_pages == 100 * 81 + 1


def test_a_draft_that_arrives_where_it_was_not_planned_for_is_told_what_makes_room() -> None:
    sizes = EpochSizes.decide(replace(GPU_CONFIG, slots=16), replace(ON_GPU, draft=None))
    draft = replace(DRAFT, memory=replace(MEMORY, free=400 * MIB))
    check_draft_memory(draft, sizes)
    remedy = "or start the server with this draft, which is then planned for, or with a larger memory_reserve_mib"
    with pytest.raises(OutOfMemoryError, match=f"MiB are needed and 50 MiB of 1000 MiB are free: .*{remedy}$"):
        check_draft_memory(replace(draft, memory=replace(MEMORY, free=50 * MIB)), sizes)


def replace_free(mib: int) -> Workers:
    """The same with less."""
    return replace(ON_GPU, verify=replace(ON_GPU.verify, memory=replace(ON_GPU.verify.memory, free=mib * MIB)))


def test_on_a_cpu_the_default_is_half_a_gibibyte_and_no_more() -> None:
    config = replace(CONFIG, kv_memory_mib=None, slots=1000)
    assert EpochSizes.decide(config, BOTH).batch.num_pages == 512 * MIB // (10 * 1280)
    large = Workers(verify=replace(VERIFY, max_context_tokens=2**20), draft=None)
    with pytest.raises(ConfigError) as caught:
        EpochSizes.decide(config, large)
    given, accepted = str(caught.value).split(", accepted: ")
    assert given == "kv_memory_mib: got 512"
    found = re.fullmatch(
        r"at least (\d+), the KV of one request with 1048576 tokens of context, or context_tokens of at most (\d+)",
        accepted,
    )
    assert found is not None
    least_mib, most_tokens = map(int, found.groups())
    assert EpochSizes.decide(replace(config, kv_memory_mib=least_mib), large).context_tokens == 2**20
    assert EpochSizes.decide(replace(config, context_tokens=most_tokens), large).context_tokens == most_tokens
    for changes in ({"kv_memory_mib": least_mib - 1}, {"context_tokens": most_tokens + 1}):
        with pytest.raises(ConfigError, match="kv_memory_mib"):
            EpochSizes.decide(replace(config, **changes), large)


def test_more_than_the_host_has_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, kv_memory_mib=300, slots=1000)
    EpochSizes.decide(config, BOTH)
    monkeypatch.setattr(scheduler_sizes, "host_bytes", lambda: 299 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        EpochSizes.decide(config, BOTH)
    assert re.fullmatch(
        r"host memory: 300 MiB are needed for \d+ KV pages, and the host has 299 MiB\. Less is needed with a smaller "
        r"context_tokens, slots, max_batched_tokens or kv_memory_mib",
        str(caught.value),
    )
