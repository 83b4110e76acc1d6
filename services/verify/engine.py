"""Verify: runs the target model over the draft's tokens, samples, publishes and stashes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from slipstream.common.errors import MismatchError
from slipstream.common.worker.step import FenceName, StepKind
from slipstream.services.models.sampler import SimulatedAcceptance
from slipstream.services.verify.graphs import VerifyGraphs
from slipstream.services.verify.target import PromptGroup, Target
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.staging import put_integers

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.common.worker.contract import Attachment, WorkerDescription
    from slipstream.common.worker.step import StepCommand
    from slipstream.services.worker.epoch import EpochState
    from slipstream.services.worker.future_map import VerifyResult
    from slipstream.services.worker.language_model import LanguageModel


class VerifyEngine:
    """Implements `RoleEngine` with a target model."""

    def __init__(
        self,
        model: LanguageModel,
        description: WorkerDescription,
        *,
        simulate_accept_length: float | None = None,
        deterministic_width: int | None = None,
    ) -> None:
        """`simulate_accept_length`: accept by chance, so many tokens a step on average; the output is no text then.

        `deterministic_width`: where steps are graphs, one size for all of them, with rows of so many tokens.
        """
        self._model = model
        self.description = description
        self._simulate_accept_length = simulate_accept_length
        self._deterministic_width = deterministic_width
        self._target: Target | None = None
        self._graphs: VerifyGraphs | None = None

    def open(self, state: EpochState) -> None:
        num_draft_tokens = state.attachment.shape.num_draft_tokens
        width = None if state.graphs is None else self._width(num_draft_tokens)
        fused, simulated = self._layers_to_fuse(state.attachment), self._acceptance(num_draft_tokens)
        self._target = Target(self._model, state, fused, simulated, width=width)
        if width is not None:
            self._model.decoder.enable_batch_invariance()
        self._model.open(state)
        if state.graphs is not None:
            self._graphs = VerifyGraphs(self._target, state, state.graphs, is_one_size=width is not None)

    def close(self) -> None:
        self._graphs = self._target = None
        self._model.slots.close()

    def phases(self, command: StepCommand, state: EpochState) -> list[Phase]:
        """See `RoleEngine.phases`: the work up to publish, then the stash."""
        assert self._target is not None, "a step belongs into an epoch"
        if command.kind is StepKind.PREFILL or not command.slots:
            return self._prefill_phases(command, state, self._target)
        if self._graphs is not None:
            return self._graphs.phases(command)
        rows = put_integers(state.staging, command.slots)
        return _phases(command.step, state, self._target, rows, partial(self._target.decode, command, rows))

    def _prefill_phases(self, command: StepCommand, state: EpochState, target: Target) -> list[Phase]:
        if not command.chunks:
            return _phases(command.step, state, target, torch.empty(0), lambda: None)
        is_one_size = state.graphs is not None and self._deterministic_width is not None
        width = state.attachment.shape.chunk_tokens if is_one_size else None
        groups = PromptGroup.of(command.chunks, state.staging, width=width, is_one=state.graphs is None)
        rows = put_integers(state.staging, [chunk.slot for chunk in command.chunks if chunk.is_last])
        return _phases(command.step, state, target, rows, partial(target.prefill, command, groups))

    def _width(self, num_draft_tokens: int) -> int | None:
        """Tokens of a row in every decode step; None where that may differ."""
        width = self._deterministic_width
        if width is not None and width <= num_draft_tokens:
            rows = f"a row of a step with {num_draft_tokens} draft tokens has {num_draft_tokens + 1}"
            raise MismatchError([f"deterministic width: verify has {width}, but {rows}"])
        return width

    def _acceptance(self, num_draft_tokens: int) -> SimulatedAcceptance | None:
        """None to accept by the target's tokens."""
        length = self._simulate_accept_length
        if length is None or not num_draft_tokens:
            return None
        if length > num_draft_tokens + 1:
            most = f"with {num_draft_tokens} draft tokens a step yields {num_draft_tokens + 1} at most"
            raise MismatchError([f"simulated accept length: verify has {length:g}, but {most}"])
        return SimulatedAcceptance(length, num_draft_tokens)

    def _layers_to_fuse(self, attachment: Attachment) -> tuple[int, ...]:
        """The layers whose inputs the draft reads: those it names, or the paper's."""
        width, config = attachment.shape.hidden_width, self._model.decoder.config
        if not width:
            return ()
        named = () if attachment.peer is None else attachment.peer.hidden_layers
        layers = named or fused_layers(config.num_layers)
        if max(layers) > config.num_layers:
            raise MismatchError([f"layers to fuse: draft asks for {list(layers)}, verify has {config.num_layers}"])
        if len(layers) * config.hidden_size != width:
            widths = f"{len(layers)} of {config.hidden_size} are not the {width} that draft reads"
            raise MismatchError([f"width of the hidden states: {widths}"])
        return layers


def _phases(
    step: int, state: EpochState, target: Target, rows: torch.Tensor, work: Callable[[], VerifyResult | None]
) -> list[Phase]:
    """Publishes and stashes the result of `work` for the slots of `rows`, if it has one."""
    results: list[VerifyResult] = []

    def publish() -> None:
        result = work()
        if result is not None:
            results.append(result)
            state.future_map.publish(step, rows, result)

    def stash() -> None:
        for result in results:
            state.future_map.stash(step, rows, result)
            target.record_output(rows, result)

    return [Phase(publish, FenceName.VERIFY_PUBLISH), Phase(stash, FenceName.VERIFY_STASH)]


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head fuses: a low, a middle and a high one (Li et al., 2025)."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))
