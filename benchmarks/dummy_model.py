"""Dummy kernels of a known length in place of the models: the rest of a step's time is the system's own.

The tokens follow a rule that draft and verify share; the draft guesses the first half of its tokens right.
Everything else of a step is real: waits, stamps, the FutureMap, signals. Context costs nothing.
On a GPU decode steps are graphs, as a model's are: few launches for the host.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from slipstream.common.device.cuda.poll_backoff import sleep_precisely
from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.models.sampler import accept
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import VerifyResult
from slipstream.services.worker.graphs import Buckets, Latest, batch_buckets, capture_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from slipstream.benchmarks.spin_kernel import SpinKernel
    from slipstream.common.device.cuda.kernels import CudaKernels
    from slipstream.common.device.interface import Device
    from slipstream.common.worker.contract import WorkerDescription
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import StepNumber
    from slipstream.services.worker.graphs import GraphedPart, GraphedStep

T = TypeVar("T")

SPIN_S = 0.00015
"""A sleep may end late by so much, and a kernel must not: 90 us are common on a virtual machine."""
MAX_CONTEXT_TOKENS = 1 << 20
FIRST_TOKEN = 32
NUM_TOKENS = 64


def without_context_cost(description: WorkerDescription) -> WorkerDescription:
    """Describes a dummy in place of a model: it keeps no KV, so a request may be as long as it likes."""
    return replace(description, max_context_tokens=MAX_CONTEXT_TOKENS, kv_bytes_per_token=1)


def token_at(positions: torch.Tensor) -> torch.Tensor:
    """The token at each position: int64 of the same shape."""
    return FIRST_TOKEN + positions % NUM_TOKENS


class HostKernel:
    """A kernel of a known length on a stream's own thread: sleeps, and looks at the clock for the last bit."""

    def __init__(self, length_ms: float) -> None:
        self._length_s = length_ms / 1000

    def run(self, compute: Callable[[], T]) -> T:
        """Stream work: returns what `compute` does; the stream goes on when the length is over."""
        end = time.monotonic() + self._length_s
        result = compute()
        sleep_precisely(max(0.0, end - time.monotonic() - SPIN_S))
        while time.monotonic() < end:
            pass
        return result

    def rows(self, values: Sequence[int]) -> torch.Tensor:
        """[len(values)] int64 where the kernel runs."""
        return torch.tensor(values, dtype=torch.int64)


class GpuKernel:
    """On a GPU: looks at its clock behind what is computed, until the length is over. Only enqueues."""

    def __init__(self, length_ms: float, kernels: CudaKernels, spin: SpinKernel, device: torch.device) -> None:
        self._length_ns = round(length_ms * 1e6)
        self._kernels = kernels
        self._spin = spin
        self._device = device
        self._start = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows: tuple[tuple[int, ...], torch.Tensor] = ((), torch.zeros(0, dtype=torch.int64, device=device))

    def run(self, compute: Callable[[], T]) -> T:
        """See `HostKernel.run`."""
        stream, start = torch.cuda.current_stream(self._device).cuda_stream, self._start.data_ptr()
        self._kernels.stamp(stream, start)
        result = compute()
        self._spin.spin_until(stream, start, self._length_ns)
        return result

    def rows(self, values: Sequence[int]) -> torch.Tensor:
        """See `HostKernel.rows`. Mostly the same as in the step before: then there is nothing to copy."""
        wanted = tuple(values)
        if self._rows[0] != wanted:
            pinned = torch.tensor(wanted, dtype=torch.int64).pin_memory()
            self._rows = (wanted, pinned.to(self._device, non_blocking=True))
        return self._rows[1]


def make_kernel(length_ms: float, device: Device | None) -> HostKernel | GpuKernel:
    """A kernel of the device; None is the CPU."""
    if device is None or device.torch_device.type == "cpu":
        return HostKernel(length_ms)
    from slipstream.benchmarks.spin_kernel import SpinKernel
    from slipstream.common.device.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), "there is no other device"
    return GpuKernel(length_ms, device.kernels, SpinKernel(device.driver), device.torch_device)


class _DummyModel:
    """A description, and a kernel in place of a model."""

    def __init__(self, description: WorkerDescription, length_ms: float, device: Device | None = None) -> None:
        """`device`: None is the CPU."""
        self.description = without_context_cost(description)
        self._kernel = make_kernel(length_ms, device)


class DummyVerify(_DummyModel):
    """Implements `RoleEngine` for verify."""

    _graphs: _VerifyGraphs | None = None

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        if state.graphs is not None:
            self._graphs = _VerifyGraphs(state, state.graphs, partial(self._check, state))

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self._graphs = None

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        if self._graphs is not None and command.slots and command.kind is not StepKind.PREFILL:
            return self._graphs.phases(command)
        chunks = [chunk for chunk in command.chunks if chunk.is_last]
        is_prefill = command.kind is StepKind.PREFILL
        rows = self._kernel.rows([chunk.slot for chunk in chunks] if is_prefill else command.slots)
        results: list[VerifyResult] = []

        def publish() -> None:
            if is_prefill:
                ends = self._kernel.rows([chunk.start + len(chunk.tokens) for chunk in chunks])
                results.append(self._kernel.run(lambda: _first_tokens(ends)))
            else:
                results.append(self._kernel.run(_checking(state, command.step, rows, command.kind)))
            state.future_map.publish(command.step, rows, results[0])

        def stash() -> None:
            state.future_map.stash(command.step, rows, results[0])

        return [Phase(publish, FenceName.VERIFY_PUBLISH), Phase(stash, FenceName.VERIFY_STASH)]

    def _check(self, state: EpochState, step: StepNumber, rows: torch.Tensor, kind: StepKind) -> VerifyResult:
        return self._kernel.run(lambda: _checking(state, step, rows, kind)())


class DummyDraft(_DummyModel):
    """Implements `RoleEngine` for draft."""

    _graphs: _DraftGraphs | None = None

    def open(self, state: EpochState) -> None:
        """See `RoleEngine.open`."""
        if state.graphs is not None:
            self._graphs = _DraftGraphs(state, state.graphs, partial(self._guess, state))

    def close(self) -> None:
        """See `RoleEngine.close`."""
        self._graphs = None

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`."""
        if self._graphs is not None and command.slots and command.kind is StepKind.DECODE:
            return self._graphs.phases(command)
        rows = self._kernel.rows(command.slots)

        def propose() -> None:
            state.future_map.propose(command.step, rows, self._kernel.run(_guessing(state, command.step, rows)))

        def prefill() -> None:
            self._kernel.run(lambda: None)

        return [Phase(propose if command.kind is StepKind.DECODE else prefill, FenceName.DRAFT_DONE)]

    def _guess(self, state: EpochState, step: StepNumber, rows: torch.Tensor) -> None:
        state.future_map.propose(step, rows, self._kernel.run(lambda: _guessing(state, step, rows)()))


def _checking(state: EpochState, step: StepNumber, rows: torch.Tensor, kind: StepKind) -> Callable[[], VerifyResult]:
    """Reads what verify needs; returns the kernel's own work."""
    seq_lens, _ = state.future_map.gather_ends(step, rows, state.slots.limits_of(rows))
    if kind is StepKind.PLAIN:
        return lambda: _first_tokens(seq_lens + 1)
    draft_tokens = state.future_map.copy_in(step, rows)
    most = state.slots.max_draft_tokens.index_select(0, rows)
    return lambda: _verified(seq_lens, draft_tokens, most)


def _guessing(state: EpochState, step: StepNumber, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Reads what draft needs; returns the kernel's own work."""
    seq_lens, _ = state.future_map.gather_ends(step, rows, state.slots.limits_of(rows))
    return lambda: _guessed(seq_lens, state.attachment.shape.num_draft_tokens)


def _guessed(seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B, num_tokens] draft tokens behind B bonus tokens, the first half of them right."""
    tokens = token_at(seq_lens[:, None] + 1 + torch.arange(num_tokens, device=seq_lens.device))
    tokens[:, (num_tokens + 1) // 2 :] = 0
    return tokens


def _verified(seq_lens: torch.Tensor, draft_tokens: torch.Tensor, most: torch.Tensor) -> VerifyResult:
    tokens = token_at(seq_lens[:, None] + 1 + torch.arange(draft_tokens.shape[1] + 1, device=seq_lens.device))
    num_accepted = torch.minimum(accept(draft_tokens, tokens), most)
    return VerifyResult(seq_lens=seq_lens + num_accepted + 1, num_accepted=num_accepted, tokens=tokens)


def _first_tokens(seq_lens: torch.Tensor) -> VerifyResult:
    """One token behind each of B lengths."""
    return VerifyResult(seq_lens=seq_lens, num_accepted=torch.zeros_like(seq_lens), tokens=token_at(seq_lens)[:, None])


class _DraftGraphs:
    """Belongs to one epoch."""

    def __init__(
        self, state: EpochState, graphed: GraphedStep, guess: Callable[[StepNumber, torch.Tensor], None]
    ) -> None:
        """`guess`: stream work up to the tokens in the arena."""
        self._state = state
        self._graphed = graphed
        self._guess = guess
        self._parts = capture_buckets("dummy kernels", _sizes(state), self._make)

    def phases(self, command: StepCommand) -> list[Phase]:
        """A decode step."""
        part = _taking(self._parts, command)
        return [Phase(partial(part.replay, self._state.future_map, command), FenceName.DRAFT_DONE, is_stamped=True)]

    def _make(self, size: int) -> GraphedPart:
        def work() -> None:
            self._graphed.stamp_start()
            self._guess(self._graphed.step, self._graphed.slots[:size])
            self._graphed.stamp_end()

        return self._graphed.capture_part(work)


class _VerifyGraphs:
    """Belongs to one epoch."""

    def __init__(
        self,
        state: EpochState,
        graphed: GraphedStep,
        check: Callable[[StepNumber, torch.Tensor, StepKind], VerifyResult],
    ) -> None:
        """`check`: stream work up to what verify found."""
        self._state = state
        self._graphed = graphed
        self._check = check
        kinds = (StepKind.DECODE, StepKind.PLAIN) if state.attachment.shape.num_draft_tokens else (StepKind.PLAIN,)
        self._parts = {
            kind: capture_buckets(f"dummy kernels, {kind.name.lower()}", _sizes(state), partial(self._make, kind))
            for kind in kinds
        }

    def phases(self, command: StepCommand) -> list[Phase]:
        """A decode step, with a draft or plain."""
        publish, stash = _taking(self._parts[command.kind], command)
        return [
            Phase(partial(publish.replay, self._state.future_map, command), FenceName.VERIFY_PUBLISH, is_stamped=True),
            Phase(partial(stash.replay, self._state.future_map, command), FenceName.VERIFY_STASH, is_stamped=True),
        ]

    def _make(self, kind: StepKind, size: int) -> tuple[GraphedPart, GraphedPart]:
        graphed, future_map = self._graphed, self._state.future_map
        rows = graphed.slots[:size]
        result = Latest["VerifyResult"]()

        def publish() -> None:
            graphed.stamp_start()
            result.value = self._check(graphed.step, rows, kind)
            future_map.publish(graphed.step, rows, result.value)

        def stash() -> None:
            future_map.stash(graphed.step, rows, result.value)
            graphed.stamp_end()

        return graphed.capture_part(publish), graphed.capture_part(stash)


def _sizes(state: EpochState) -> tuple[int, ...]:
    return batch_buckets(state.attachment.shape.num_slots - 1)


def _taking(buckets: Buckets[T], command: StepCommand) -> T:
    made = buckets.get(len(command.slots))
    assert made is not None, "graphs of dummy kernels take next to no memory"
    return made
