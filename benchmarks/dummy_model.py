"""Dummy kernels of a known length in place of the models: the rest of a step's time is the system's own.

The tokens follow a rule that draft and verify share; the draft guesses the first half of its tokens right.
Everything else of a step is real: waits, stamps, the FutureMap, signals. Context costs nothing.
On a GPU decode steps are graphs, as a model's are: few launches for the host.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

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


class _DummyRole(Generic[T]):
    """Implements `RoleEngine` with a kernel in place of a model, whose result is a T."""

    fences: tuple[FenceName, ...]
    """The fence of each part of a step."""

    def __init__(self, description: WorkerDescription, length_ms: float, device: Device | None = None) -> None:
        """`device`: None is the CPU. A dummy keeps no KV, so a request may be as long as it likes."""
        self.description = replace(description, max_context_tokens=MAX_CONTEXT_TOKENS, kv_bytes_per_token=1)
        self._kernel = make_kernel(length_ms, device)
        self._graphs: dict[StepKind, Buckets[tuple[GraphedPart, ...]]] = {}

    def open(self, state: EpochState) -> None:
        if state.graphs is not None:
            sizes = batch_buckets(state.attachment.shape.num_slots - 1)
            for kind in self._graphed_kinds(state):
                make = partial(self._capture, state, state.graphs, kind)
                self._graphs[kind] = capture_buckets(f"dummy kernels, {kind.name.lower()}", sizes, make)

    def close(self) -> None:
        self._graphs = {}

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        if command.kind in self._graphs and command.slots:
            parts = self._graphs[command.kind].get(len(command.slots))
            assert parts is not None, "graphs of dummy kernels take next to no memory"
            works = tuple(partial(part.replay, state.future_map, command) for part in parts)
            return [Phase(work, fence, is_stamped=True) for work, fence in zip(works, self.fences, strict=True)]
        rows = self._kernel.rows(command.slots)
        return self._phases(state, command, rows, partial(self._read, state, command.step, rows, command.kind))

    def _phases(
        self, state: EpochState, command: StepCommand, rows: torch.Tensor, read: Callable[[], Callable[[], T]]
    ) -> list[Phase]:
        """Without a graph, reading comes before the kernel."""
        works = self._works(state, command.step, rows, lambda: self._kernel.run(read()))
        return [Phase(work, fence) for work, fence in zip(works, self.fences, strict=True)]

    def _capture(self, state: EpochState, graphed: GraphedStep, kind: StepKind, size: int) -> tuple[GraphedPart, ...]:
        """In a graph, reading is part of the kernel."""
        step, rows = graphed.step, graphed.slots[:size]
        works = self._works(state, step, rows, lambda: self._kernel.run(lambda: self._read(state, step, rows, kind)()))

        def run(number: int) -> None:
            if number == 0:
                graphed.stamp_start()
            works[number]()
            if number == len(works) - 1:
                graphed.stamp_end()

        return tuple(graphed.capture_part(partial(run, number)) for number in range(len(works)))

    def _graphed_kinds(self, state: EpochState) -> tuple[StepKind, ...]:
        raise NotImplementedError

    def _read(self, state: EpochState, step: StepNumber, rows: torch.Tensor, kind: StepKind) -> Callable[[], T]:
        """Reads what a decode step needs; returns the kernel's own work."""
        raise NotImplementedError

    def _works(
        self, state: EpochState, step: StepNumber, rows: torch.Tensor, run: Callable[[], T]
    ) -> tuple[Callable[[], None], ...]:
        """The stream work of each part of a step; `run` is the kernel."""
        raise NotImplementedError


class DummyVerify(_DummyRole[VerifyResult]):
    """Implements `RoleEngine` for verify."""

    fences = (FenceName.VERIFY_PUBLISH, FenceName.VERIFY_STASH)

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        if command.kind is not StepKind.PREFILL:
            return super().phases(command, state)
        chunks = [chunk for chunk in command.chunks if chunk.is_last]

        def read() -> Callable[[], VerifyResult]:
            ends = self._kernel.rows([chunk.start + len(chunk.tokens) for chunk in chunks])
            return lambda: _first_tokens(ends)

        return self._phases(state, command, self._kernel.rows([chunk.slot for chunk in chunks]), read)

    def _graphed_kinds(self, state: EpochState) -> tuple[StepKind, ...]:
        return (StepKind.DECODE, StepKind.PLAIN) if state.attachment.shape.num_draft_tokens else (StepKind.PLAIN,)

    def _read(
        self, state: EpochState, step: StepNumber, rows: torch.Tensor, kind: StepKind
    ) -> Callable[[], VerifyResult]:
        seq_lens, _ = state.future_map.gather_ends(step, rows, state.slots.limits_of(rows))
        if kind is StepKind.PLAIN:
            return lambda: _first_tokens(seq_lens + 1)
        draft_tokens = state.future_map.copy_in(step, rows)
        most = state.slots.max_draft_tokens.index_select(0, rows)
        return lambda: _verified(seq_lens, draft_tokens, most)

    def _works(
        self, state: EpochState, step: StepNumber, rows: torch.Tensor, run: Callable[[], VerifyResult]
    ) -> tuple[Callable[[], None], ...]:
        result = Latest["VerifyResult"]()

        def publish() -> None:
            result.value = run()
            state.future_map.publish(step, rows, result.value)

        return publish, lambda: state.future_map.stash(step, rows, result.value)


class DummyDraft(_DummyRole[torch.Tensor]):
    """Implements `RoleEngine` for draft."""

    fences = (FenceName.DRAFT_DONE,)

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        if command.kind is StepKind.DECODE:
            return super().phases(command, state)
        return [Phase(lambda: self._kernel.run(lambda: None), FenceName.DRAFT_DONE)]

    def _graphed_kinds(self, state: EpochState) -> tuple[StepKind, ...]:
        return (StepKind.DECODE,)

    def _read(
        self, state: EpochState, step: StepNumber, rows: torch.Tensor, kind: StepKind
    ) -> Callable[[], torch.Tensor]:
        seq_lens, _ = state.future_map.gather_ends(step, rows, state.slots.limits_of(rows))
        return lambda: _guessed(seq_lens, state.attachment.shape.num_draft_tokens)

    def _works(
        self, state: EpochState, step: StepNumber, rows: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> tuple[Callable[[], None], ...]:
        return (lambda: state.future_map.propose(step, rows, run()),)


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
