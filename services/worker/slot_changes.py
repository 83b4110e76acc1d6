"""What changes in a worker's slots before a step, as tensors: made on the host, staged, written in stream order."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

import torch

from slipstream.services.models.adjustments import AdjustmentRows
from slipstream.services.models.sampler import SamplingRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.api.sampling import SamplingParams
    from slipstream.common.worker.step import SlotUpdate
    from slipstream.services.models.sampler import ParameterRows
    from slipstream.services.worker.staging import Staging

_Rows = TypeVar("_Rows", bound="ParameterRows")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenSlots:
    """The slots that other requests take, and how those sample."""

    slots: torch.Tensor
    """[T] int64."""
    sampling: SamplingRows
    adjustments: AdjustmentRows | None
    """None where neither they nor those before them have any."""
    params: dict[int, SamplingParams]
    """By slot, on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanges:
    """Of U slots. All tensors are on the device."""

    slots: torch.Tensor
    """[U] int64."""
    limits: torch.Tensor
    """[U] int64."""
    max_draft_tokens: torch.Tensor
    """[U] int64."""
    emptied: torch.Tensor
    """[E] int64: slots whose page lists begin anew."""
    places: torch.Tensor
    """[P] int64: where in the page table, row after row, `pages` go."""
    pages: torch.Tensor
    """[P] int64."""
    taken: TakenSlots | None

    @classmethod
    def of(
        cls,
        updates: Sequence[SlotUpdate],
        staging: Staging,
        *,
        max_pages: int,
        max_draft_tokens: Sequence[int],
        adjusted: set[int],
    ) -> SlotChanges:
        """`max_pages`: of a slot's list. `max_draft_tokens`: by update. `adjusted`: slots that have adjustments."""
        places: list[int] = []
        for update in updates:
            first = update.slot * max_pages + update.first_page_index
            places += range(first, first + len(update.pages))

        def put(values: list[int]) -> torch.Tensor:
            return staging.put(torch.tensor(values, dtype=torch.int64))

        return cls(
            slots=put([update.slot for update in updates]),
            limits=put([update.limit_tokens for update in updates]),
            max_draft_tokens=put(list(max_draft_tokens)),
            emptied=put([update.slot for update in updates if update.first_page_index == 0]),
            places=put(places),
            pages=put([page for update in updates for page in update.pages]),
            taken=_taken(updates, staging, adjusted),
        )


def _taken(updates: Sequence[SlotUpdate], staging: Staging, adjusted: set[int]) -> TakenSlots | None:
    params = {update.slot: update.sampling for update in updates if update.sampling is not None}
    if not params:
        return None
    rows = list(params.values())
    has_adjustments = not adjusted.isdisjoint(params) or any(row.adjusts_logits for row in rows)
    return TakenSlots(
        slots=staging.put(torch.tensor(list(params), dtype=torch.int64)),
        sampling=_put(SamplingRows.of(rows), staging),
        adjustments=_put(AdjustmentRows.of(rows), staging) if has_adjustments else None,
        params=params,
    )


def _put(rows: _Rows, staging: Staging) -> _Rows:
    return type(rows)(**{field.name: staging.put(getattr(rows, field.name)) for field in fields(rows)})
