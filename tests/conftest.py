"""Settings of all tests: one thread of computation a process, samples of slow properties, the slowest tests."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from typing import Any

# Several test processes and the services that they start share the cores. Before torch reads it.
os.environ["OMP_NUM_THREADS"] = "1"
# gRPC's own notes would appear between the dots.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.harness import sampling

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Before Triton is imported: its kernels then run on the CPU, in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of `make test`."""
    group = parser.getgroup("slipstream")
    group.addoption("--sampled", action="store_true", help="run a random sample of each test marked `sampled`")
    group.addoption("--sample-seed", type=int, help="seed of that sample; a new one is drawn and printed by default")
    group.addoption("--slowest", type=int, default=0, help="name so many of the slowest tests at the very end")


def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed of the sample; a process of pytest-xdist takes that of the process that started it."""
    if hasattr(config, "workerinput"):
        config.option.sample_seed = config.workerinput["sample_seed"]
    elif config.option.sample_seed is None:
        config.option.sample_seed = random.SystemRandom().randrange(10**6)
    sampling.is_sampled = config.option.sampled
    # How long an example takes depends on what else the machine does; pytest bounds the whole test.
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        print_blob=True,
        max_examples=sampling.examples(100),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which counts the time that others took, too
    )
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hands the seed to a process of pytest-xdist."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


@pytest.fixture
def tiny_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps and large ones differ at any size, so that steps draft none while prompts wait."""
    monkeypatch.setattr("slipstream.scheduler.sizes.LEAST_SMALL", 1)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Prints the seed of the sample."""
    return f"sampled: --sample-seed={config.option.sample_seed}" if config.option.sampled else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `sampled` or `sampled_module` and not drawn, where --sampled is given."""
    if config.option.sampled:
        left_out = sampling.left_out(items, config.option.sample_seed)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Names the slowest tests behind all other summaries, just before pytest's closing line."""
    yield
    seconds: Counter[str] = Counter()
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration  # type: ignore[assignment]
    if config.option.slowest and seconds:
        terminalreporter.write_sep("=", f"slowest {config.option.slowest} tests, setup and teardown included")
        for name, duration in seconds.most_common(config.option.slowest):
            terminalreporter.write_line(f"{duration:6.1f} s  {name}")


def pytest_unconfigure() -> None:
    """Lets the collector see every object again: Triton reports what is left when the interpreter ends."""
    gc.unfreeze()
