"""Dummy kernels of a known length in place of the models: the rest of a step's time is the system's own.

The tokens follow a rule that draft and verify share; the draft guesses the first half of its tokens right.
Everything else of a step is real: waits, stamps, the FutureMap, signals. Context costs nothing.
On a GPU decode steps are graphs, as a model's are: few launches for the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from slipstream.common.device.cuda.poll_backoff import sleep_precisely
from slipstream.common.wire.layout import DECODE_PART, PREFILL_PART
from slipstream.common.wire.step import FenceName, WaitPlace
from slipstream.services.models.sampler import accept
from slipstream.services.verify.graphs import phases_of_decode
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.future_map import VerifyResult
from slipstream.services.worker.graphs import Latest, at_once, batch_buckets, capture_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from slipstream.benchmarks.spin_kernel import SpinKernel
    from slipstream.common.device.cuda.driver import CudaKernels
    from slipstream.common.device.interface import Device
    from slipstream.common.wire.step import StepCommand
    from slipstream.common.wire.worker import WorkerDescription
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import Region, StepNumber
    from slipstream.services.worker.graphs import Buckets, GraphedPart, GraphedStep

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
    """On a GPU: looks at its clock after what is computed, until the length is over. Only enqueues."""

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
    """A kernel of the device; None: the CPU."""
    if device is None or device.torch_device.type == "cpu":
        return HostKernel(length_ms)
    from slipstream.benchmarks.spin_kernel import SpinKernel
    from slipstream.common.device.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice), "there is no other device"
    return GpuKernel(length_ms, device.kernels, SpinKernel(device.driver), device.torch_device)


def _describe(description: WorkerDescription) -> WorkerDescription:
    """A dummy keeps no KV, so a request may be as long as it likes. Its steps are of one kind."""
    return replace(
        description,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        kv_bytes_per_token=1,
        takes_mixed_steps=False,
        takes_ragged_steps=False,
    )


class DummyVerify:
    """Implements `RoleEngine` for verify. A graph is a whole decode step."""

    def __init__(self, description: WorkerDescription, length_ms: float, device: Device | None = None) -> None:
        """`device`: None: the CPU."""
        self.description = _describe(description)
        self._kernel = make_kernel(length_ms, device)
        self._graphs: dict[int, Buckets[_Captured]] = {}
        """By the number of draft tokens; 0 for plain steps."""

    def open(self, state: EpochState) -> None:
        expected = state.attachment.expected_draft
        for num_draft_tokens in {0, 0 if expected is None else expected.num_draft_tokens}:
            self._capture(state, num_draft_tokens)

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        self._capture(state, region.sizes.num_draft_tokens)
        return iter(())

    def close(self) -> None:
        self._graphs = {}

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        region = state.region_of(command)
        if not command.slots:
            return self._prefill_phases(command, state, region)
        if self._graphs:
            return self._graphed_phases(command, state, region, command.most_draft_tokens)
        rows, result = self._kernel.rows(command.slots), Latest[VerifyResult]()

        def publish() -> None:
            draft_tokens = None
            if region is not None and command.most_draft_tokens:
                draft_tokens = state.future_map.copy_in(command.step, region, command.slots, rows)
            verify = _reading(state, command.step, rows, draft_tokens)
            result.value = self._kernel.run(verify)
            state.future_map.publish(command.step, rows, result.value)

        return _phases(publish, partial(_stash, command, region, rows, result))

    def _prefill_phases(self, command: StepCommand, state: EpochState, region: Region | None) -> list[Phase]:
        chunks = [chunk for chunk in command.chunks if chunk.is_last]
        slots, result = tuple(chunk.slot for chunk in chunks), Latest[VerifyResult]()
        rows = self._kernel.rows(slots)

        def publish() -> None:
            ends = self._kernel.rows([chunk.start + len(chunk.tokens) for chunk in chunks])
            result.value = self._kernel.run(lambda: _first_tokens(ends))
            state.future_map.publish(command.step, rows, result.value)

        return _phases(publish, partial(_stash, replace(command, slots=slots, chunks=()), region, rows, result))

    def _graphed_phases(
        self, command: StepCommand, state: EpochState, region: Region | None, num_draft_tokens: int
    ) -> list[Phase]:
        captured = self._graphs[num_draft_tokens].get(len(command.slots))
        assert captured is not None, "graphs of dummy kernels take next to no memory"

        def replay() -> None:
            if region is not None and num_draft_tokens:
                state.future_map.log_copy_in(command.step, region, command.slots)
            captured.part.replay(state.future_map, command)
            if region is not None:
                region.log_stash(command.step, command.slots, captured.result.value)

        return phases_of_decode(lambda: None, replay)

    def _capture(self, state: EpochState, num_draft_tokens: int) -> None:
        if state.graphs is None or num_draft_tokens in self._graphs:
            return
        num_slots = state.attachment.shape.num_slots
        make = partial(self._make, state, state.graphs, num_draft_tokens)
        what = f"dummy kernels, {num_draft_tokens} draft tokens"
        self._graphs[num_draft_tokens] = at_once(capture_buckets(what, batch_buckets(num_slots - 1), make))

    def _make(self, state: EpochState, graphed: GraphedStep, num_draft_tokens: int, size: int) -> _Captured:
        rows, result = graphed.slots[:size], Latest[VerifyResult]()

        def work() -> None:
            draft_tokens = None
            if num_draft_tokens:
                draft_tokens = state.future_map.copy_in_captured(graphed.step, rows, num_draft_tokens)
            result.value = self._kernel.run(lambda: _reading(state, graphed.step, rows, draft_tokens)())
            state.future_map.publish(graphed.step, rows, result.value)
            state.future_map.stash_captured(graphed.step, rows, result.value)

        return _Captured(graphed.capture_part(work), result)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph for batches up to one size."""

    part: GraphedPart
    result: Latest[VerifyResult]


def _reading(
    state: EpochState, step: StepNumber, rows: torch.Tensor, draft_tokens: torch.Tensor | None
) -> Callable[[], VerifyResult]:
    """Reads what a decode step needs; returns the kernel's own work."""
    seq_lens, _ = state.future_map.ends(step, rows, state.slots.limits)
    if draft_tokens is None:
        return lambda: _first_tokens(seq_lens + 1)
    most = state.slots.max_draft_tokens.index_select(0, rows)
    return lambda: _verified(seq_lens, draft_tokens, most)


def _stash(command: StepCommand, region: Region | None, rows: torch.Tensor, result: Latest[VerifyResult]) -> None:
    if region is not None:
        region.stash(command.step, command.slots, rows, result.value)


def _phases(publish: Callable[[], None], stash: Callable[[], None]) -> list[Phase]:
    return [
        Phase(lambda: None, place=WaitPlace.START),
        Phase(publish, (FenceName.VERIFY_PUBLISH,), WaitPlace.SAMPLING),
        Phase(stash, (FenceName.VERIFY_STASH,)),
    ]


class DummyDraft:
    """Implements `RoleEngine` for draft. A graph is a whole decode step."""

    def __init__(self, description: WorkerDescription, length_ms: float, device: Device | None = None) -> None:
        """`device`: None: the CPU."""
        self.description = _describe(description)
        self._kernel = make_kernel(length_ms, device)
        self._graphs: Buckets[GraphedPart] | None = None

    def open(self, state: EpochState) -> None:
        if state.graphs is not None:
            sizes = batch_buckets(state.attachment.shape.num_slots - 1)
            make = partial(self._capture, state, state.graphs)
            self._graphs = at_once(capture_buckets("dummy kernels", sizes, make))

    def prepare(self, region: Region, state: EpochState) -> Iterator[None]:
        raise NotImplementedError

    def close(self) -> None:
        self._graphs = None

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        if not command.slots:
            fences, place = (FenceName.DRAFT_PREFILLED,), WaitPlace.PREFILL_HIDDEN
            return [Phase(lambda: self._kernel.run(lambda: None), fences, place, PREFILL_PART)]
        fences, place = (FenceName.DRAFT_PROPOSED,), WaitPlace.START
        if self._graphs is None:
            rows = self._kernel.rows(command.slots)
            return [Phase(lambda: self._propose(state, command.step, rows), fences, place, DECODE_PART)]
        part = self._graphs.get(len(command.slots))
        assert part is not None, "graphs of dummy kernels take next to no memory"
        return [Phase(partial(part.replay, state.region, command), fences, place, DECODE_PART, is_stamped=True)]

    def _capture(self, state: EpochState, graphed: GraphedStep, size: int) -> GraphedPart:
        return graphed.capture_part(partial(self._propose, state, graphed.step, graphed.slots[:size]))

    def _propose(self, state: EpochState, step: StepNumber, rows: torch.Tensor) -> None:
        stash = state.region.gather(step, rows, state.slots.limits)
        tokens = self._kernel.run(lambda: _guessed(stash.seq_lens, state.attachment.shape.num_draft_tokens))
        state.region.propose(step, rows, tokens)


def _guessed(seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B, num_tokens] draft tokens after B bonus tokens, the first half of them right."""
    tokens = token_at(seq_lens[:, None] + 1 + torch.arange(num_tokens, device=seq_lens.device))
    tokens[:, (num_tokens + 1) // 2 :] = 0
    return tokens


def _verified(seq_lens: torch.Tensor, draft_tokens: torch.Tensor, most: torch.Tensor) -> VerifyResult:
    tokens = token_at(seq_lens[:, None] + 1 + torch.arange(draft_tokens.shape[1] + 1, device=seq_lens.device))
    num_accepted = torch.minimum(accept(draft_tokens, tokens), most)
    return VerifyResult(seq_lens=seq_lens + num_accepted + 1, num_accepted=num_accepted, tokens=tokens)


def _first_tokens(seq_lens: torch.Tensor) -> VerifyResult:
    """One token after each of B lengths."""
    return VerifyResult(seq_lens=seq_lens, num_accepted=torch.zeros_like(seq_lens), tokens=token_at(seq_lens)[:, None])
