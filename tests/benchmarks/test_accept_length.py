"""The file of accept lengths keeps old results until there are new ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from slipstream.benchmarks import accept_length
from slipstream.benchmarks.accept_length import AcceptLength, main
from slipstream.benchmarks.models import EAGLE3, MTP, STANDALONE
from slipstream.benchmarks.result_files import read_rows, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

OLD = AcceptLength(
    algorithm=EAGLE3,
    workload="held-out",
    num_draft_tokens=4,
    temperature=0.8,
    max_new_tokens=128,
    seed=1,
    num_prompts=64,
    num_verify_steps=100,
    total_draft_tokens=400,
    total_accepted_tokens=250,
    mean_accept_length=3.5,
    repeated_share=0.6,
    tokens_per_second=1000.0,
)


def test_a_run_that_is_broken_off_replaces_what_it_measured_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, new = tmp_path / "results.json", replace(OLD, mean_accept_length=3.6)
    others = [replace(OLD, seed=2), replace(OLD, num_draft_tokens=3), replace(OLD, algorithm=MTP)]
    write_rows([OLD, *others], file)

    async def broken_off(_: Sequence[str], device: str, keep: Callable[[AcceptLength], None]) -> None:
        keep(new)
        keep(replace(new, algorithm=STANDALONE))
        raise TimeoutError

    monkeypatch.setattr(accept_length, "_measure_all", broken_off)
    with pytest.raises(TimeoutError):
        main(",".join((STANDALONE, EAGLE3)), "cpu", file)
    assert read_rows(file, AcceptLength) == [replace(new, algorithm=STANDALONE), new, *others]
