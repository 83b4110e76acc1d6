"""How many tokens a step beside decoding has, by made-up times of forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from slipstream.bundled import target_dir
from slipstream.common.device.cpu.device import HostDevice
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.verify import step_tokens
from slipstream.services.worker import graphs
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.factory import make_verify
from tests.harness.inline_device import InlineDevice
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import local_workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.device.interface import Device


@pytest.mark.parametrize(
    ("device", "chunk_tokens", "prompt_ms", "expected"),
    [
        pytest.param("cuda", 2048, lambda tokens: 4 + tokens / 50, 2048, id="an 8B model on an H200"),
        pytest.param("cuda", 2048, lambda tokens: 4 + tokens / 40, 1024, id="a slower GPU"),
        pytest.param("cuda", 512, lambda tokens: 1.0, 512, id="no room for larger steps"),
        pytest.param("cuda", 2048, lambda tokens: 1000.0, 32, id="never fewer"),
        pytest.param("cuda", 16, lambda tokens: 1.0, 32, id="a short context, which bounds it by itself"),
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
    """A decode step takes 4 ms."""
    clock = SimpleNamespace(ms=0.0)

    def take(ms: float) -> None:
        clock.ms += ms

    monkeypatch.setattr(graphs, "_wait_for", lambda _: None)
    monkeypatch.setattr(step_tokens, "_put", lambda *_: None)
    monkeypatch.setattr(step_tokens, "_decode", lambda _: take(4.0))
    monkeypatch.setattr(step_tokens, "_prefill", lambda _model, _state, num_tokens: take(prompt_ms(num_tokens)))
    monkeypatch.setattr(graphs, "time", SimpleNamespace(monotonic=lambda: clock.ms / 1000))
    model: Any = SimpleNamespace(device=torch.device(device))
    attachment = SimpleNamespace(context_tokens=4096, shape=SimpleNamespace(chunk_tokens=chunk_tokens))
    state: Any = SimpleNamespace(attachment=attachment)
    assert step_tokens.measure_step_tokens(model, state) == expected


@pytest.mark.parametrize("make_device", [HostDevice, InlineDevice])
def test_verify_measures_it_when_its_epoch_opens_unless_a_number_is_given(make_device: Callable[[], Device]) -> None:
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
            else:
                assert (sizes.chunk_tokens, sizes.mixed_tokens) == (100, 100)
