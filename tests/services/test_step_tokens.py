"""How many tokens a step beside decoding has, by made-up times of forwards."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.bundled import target_dir
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.interface import Device
from slipstream.common.wire.worker import StepTokens
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_verify
from slipstream.services.verify import engine
from slipstream.services.worker import graphs
from slipstream.services.worker.config import WorkerConfig
from tests.harness.inline_device import InlineDevice
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import local_workers


@pytest.mark.parametrize(
    ("device", "chunk_tokens", "prompt_ms", "expected"),
    [
        pytest.param("cuda", 2048, lambda tokens: 4 + tokens / 50, 2048, id="an 8B model on an H200"),
        pytest.param("cuda", 8192, lambda tokens: 4 + tokens / 400, 2048, id="a faster GPU"),
        pytest.param("cuda", 2048, lambda tokens: 4 + tokens / 40, 1024, id="a slower GPU"),
        pytest.param("cuda", 512, lambda tokens: 1.0, 512, id="no room for larger steps"),
        pytest.param("cuda", 2048, lambda tokens: 1000.0, 32, id="never fewer"),
        pytest.param("cuda", 16, lambda tokens: 1.0, 16, id="a short context, which bounds it by itself"),
        pytest.param("cpu", 512, lambda tokens: tokens / 5, 32, id="a CPU"),
        pytest.param("cpu", 512, lambda tokens: 2 + tokens / 40, 64, id="a CPU whose steps cost much by themselves"),
    ],
)
def test_the_largest_step_that_is_short_enough(
    device: str,
    chunk_tokens: int,
    prompt_ms: Callable[[int], float],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _measured(monkeypatch, device, chunk_tokens, lambda tokens, _: prompt_ms(tokens))
    assert found.num_tokens == expected


@pytest.mark.parametrize(
    ("device", "context_tokens", "expected"),
    [
        pytest.param("cpu", 8192, 2500, id="a long context"),
        pytest.param("cpu", 1024, 2500, id="shorter than what doubles a step"),
        pytest.param("cpu", 32, None, id="no longer than the chunk"),
        pytest.param("cpu", 40, None, id="too short to tell"),
        pytest.param("cuda", 8192, None, id="a GPU, whose steps do not shrink"),
    ],
)
def test_the_context_behind_which_a_step_takes_twice_as_long(
    device: str, context_tokens: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 tokens take 6 ms beside the 4 ms of a decode step, and 4 us more for each token before them."""
    found = _measured(monkeypatch, device, 32, lambda _, start: 6 + 0.004 * start, context_tokens=context_tokens)
    assert found == StepTokens(32, expected)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("pause_ms", "expected"), [(200, 8192), (25, 1024), (1, 32)])
def test_a_pause_that_was_asked_for_bounds_a_step_by_itself(
    device: str, pause_ms: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _measured(monkeypatch, device, 8192, lambda tokens, _: 4 + tokens / 50, pause_ms=pause_ms)
    assert found.num_tokens == expected


def _measured(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    chunk_tokens: int,
    prompt_ms: Callable[[int, int], float],
    *,
    context_tokens: int = 4096,
    pause_ms: int = 0,
) -> StepTokens:
    """Measures with a decode step of 4 ms. `prompt_ms`: of a forward over so many tokens after a context."""
    clock = SimpleNamespace(ms=0.0)

    def take(ms: float) -> None:
        clock.ms += ms

    def prefill(_model: Any, _state: Any, num_tokens: int, *, start: int = 0) -> None:
        take(prompt_ms(num_tokens, start))

    monkeypatch.setattr(graphs, "_wait_for", lambda _: None)
    monkeypatch.setattr(engine, "_put", lambda *_: None)
    monkeypatch.setattr(engine, "_decode", lambda _: take(4.0))
    monkeypatch.setattr(engine, "_prefill", prefill)
    monkeypatch.setattr(graphs, "time", SimpleNamespace(monotonic=lambda: clock.ms / 1000))
    model: Any = SimpleNamespace(device=torch.device(device))
    attachment = SimpleNamespace(
        context_tokens=context_tokens,
        longest_pause_ns=pause_ms * 10**6,
        shape=SimpleNamespace(chunk_tokens=chunk_tokens),
    )
    state: Any = SimpleNamespace(attachment=attachment)
    return engine.measure_step_tokens(model, state)


@pytest.mark.parametrize("make_device", [HostDevice, InlineDevice])
def test_verify_measures_it_when_its_epoch_opens_unless_a_number_is_given(
    make_device: Callable[[], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_doubling_context", lambda *_: 77)
    device = make_device()
    verify = make_verify(WorkerConfig(model=target_dir()), device, 0)
    with local_workers(verify, device=device) as workers:
        for number, given in enumerate((None, 100), start=1):
            config = SchedulerConfig(verify="unix:/none", slots=2, context_tokens=256, max_batched_tokens=given)
            epoch = LocalEpoch(number, config, workers, device=device)
            with epoch.loop():
                sizes = epoch.epoch.batch.sizes
            if given is None:
                assert sizes.shared_chunk_tokens in {32, 64, 128, 256}
                assert sizes.chunk_tokens == 256
                assert sizes.doubling_context == 77
            else:
                assert (sizes.chunk_tokens, sizes.mixed_tokens, sizes.doubling_context) == (100, 100, None)
