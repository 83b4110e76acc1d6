"""Embedding and output that verify lends to a head: read where they are, by drafts that ask for them alone."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.device.cpu.shared_file import DIRECTORY
from slipstream.common.errors import MismatchError
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.manifest import BufferSpec, Manifest
from slipstream.scheduler.attachment import check_fits
from slipstream.scheduler.sizes import MemoryPlan
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.checkpoint import load_head
from slipstream.services.models.head_config import EAGLE
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.checkpoints import LLAMA, VOCAB_SIZE, write_checkpoint
from tests.harness.eagle3_checkpoints import ALGORITHMS, BLOCKS, EAGLE_AUTHORS, MODULES, make_head, write_head
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import make_jobs

CPU, HIDDEN = torch.device("cpu"), LLAMA["hidden_size"]
ONE_TABLE = VOCAB_SIZE * HIDDEN * torch.float32.itemsize
WAY = Way(num_draft_tokens=3)


@pytest.fixture(scope="module")
def lender(target: Path) -> RoleEngine:
    """The target, with weights to lend."""
    return make_verify(WorkerConfig(model=target, share_weights=True), HostDevice(), 0)


def lent(role: RoleEngine) -> Manifest:
    """What a target lends."""
    assert role.description.weights is not None, "it lends"
    return role.description.weights


def borrowing(path: Path, target: Path, layout: str = EAGLE_AUTHORS) -> RoleEngine:
    """A head without embedding and output, which is right now and then."""
    make_head(path, target, layout)
    config = WorkerConfig(model=path, target=target, algorithm=ALGORITHMS[layout], share_weights=True)
    return make_draft(config, HostDevice(), 0)


def accepted(verify: RoleEngine, head: RoleEngine, reference: list[list[int]]) -> int:
    """Draft tokens that are accepted of jobs whose output is asserted."""
    jobs = make_jobs()
    assert Served(Models(verify, head, head), WAY).run(jobs) == reference
    return sum(job.stats.total_accepted_tokens for job in jobs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [EAGLE_AUTHORS, MODULES, BLOCKS])
def test_a_head_drafts_with_borrowed_weights_as_with_its_own(
    lender: RoleEngine, target: Path, tmp_path: Path, reference: list[list[int]], layout: str
) -> None:
    borrows, owns = borrowing(tmp_path / "head", target, layout), make_head(tmp_path / "own", target, layout)
    assert (borrows.description.shared_weight_bytes, owns.description.shared_weight_bytes) == (2 * ONE_TABLE, 0)
    counts = [accepted(lender, head, reference) for head in (borrows, owns, borrows)]
    assert counts[0] == counts[1] == counts[2] > 0


def test_only_drafts_that_ask_are_given_the_weights(lender: RoleEngine, target: Path, tmp_path: Path) -> None:
    owns = make_head(tmp_path / "own", target, EAGLE_AUTHORS)
    for head, is_given in ((owns, False), (borrowing(tmp_path / "head", target), True)):
        served = Served(Models(lender, head, head), WAY)
        with served.epoch.loop():
            draft = served.epoch.attachments[0].link
            (state,) = [worker.engine._open.state for worker in served.epoch._links.values() if worker is draft]
            assert bool(state.weights) is is_given
        served.close()


def test_a_target_that_lends_nothing_refuses_a_head_that_borrows(
    verify: RoleEngine, lender: RoleEngine, target: Path, tmp_path: Path
) -> None:
    head, device = borrowing(tmp_path / "head", target), HostDevice()
    check_fits(device, lender.description, head.description)
    with pytest.raises(MismatchError, match="verify's, which lends none"):
        check_fits(device, verify.description, head.description)


def test_weights_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", layout=EAGLE_AUTHORS, has_embedding=False)
    head = load_head(EAGLE, path, target=target, device=CPU, dtype=torch.float32, borrows=True)
    assert head.embedding.numel() == 0
    table = torch.zeros(VOCAB_SIZE, HIDDEN)
    for weights, message in (
        ({}, "lends nothing"),
        ({BufferName.EMBEDDING: table[1:]}, r"lends \[271, 64\] of torch.float32"),
        ({BufferName.EMBEDDING: table, BufferName.OUTPUT: table.bfloat16()}, "of torch.bfloat16"),
    ):
        with pytest.raises(MismatchError, match=message):
            head.borrow(weights)
    head.borrow({BufferName.EMBEDDING: table})
    assert head.logits(torch.ones(HIDDEN)).tolist() == [0.0] * VOCAB_SIZE
    head.give_back()
    assert head.embedding.numel() == 0


@pytest.mark.parametrize(("has_own", "vocab_size"), [(True, VOCAB_SIZE), (False, VOCAB_SIZE + 16)])
def test_a_head_borrows_neither_what_it_has_nor_what_has_other_sizes(
    tmp_path: Path, *, has_own: bool, vocab_size: int
) -> None:
    target = write_checkpoint(tmp_path / "target", vocab_size=vocab_size)
    path = write_head(tmp_path / "head", layout=EAGLE_AUTHORS, has_embedding=has_own)
    head = load_head(EAGLE, path, target=target, device=CPU, dtype=torch.float32, borrows=True)
    assert (head.num_borrowed_bytes, len(head.embedding)) == (0, VOCAB_SIZE)


@pytest.mark.parametrize("is_tied", [False, True])
def test_lent_weights_are_the_targets_and_outlive_it(tmp_path: Path, *, is_tied: bool) -> None:
    path = write_checkpoint(tmp_path / "target", tie_word_embeddings=is_tied)
    role: RoleEngine | None = make_verify(WorkerConfig(model=path, share_weights=True), HostDevice(), 0)
    assert role is not None
    manifest = lent(role)
    names = [BufferName.EMBEDDING] if is_tied else [BufferName.EMBEDDING, BufferName.OUTPUT]
    expected = [BufferSpec(name, (VOCAB_SIZE, HIDDEN), torch.float32, "verify") for name in names]
    assert [placed.spec for placed in manifest.buffers] == expected
    arena = HostDevice().open_arena(manifest, read_only=True)
    own = load_head_weights(path)
    del role
    gc.collect()
    assert not (DIRECTORY / manifest.path).exists(), "the name is gone with the target"
    for name, theirs in zip(names, own, strict=False):
        assert torch.equal(arena.tensor(name), theirs)
    arena.close()


def load_head_weights(target: Path) -> list[torch.Tensor]:
    """The target's embedding and output, as its files have them."""
    from safetensors.torch import load_file

    weights = load_file(target / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return [weights[name].float() for name in names if name in weights]


def test_the_plan_of_memory_knows_what_is_saved(lender: RoleEngine, target: Path, tmp_path: Path) -> None:
    head = borrowing(tmp_path / "head", target).description
    plan = MemoryPlan([lender.description, head], page_bytes=1, step_tokens=1, step_choices=1, reserve_bytes=0)
    assert plan.shared == 2 * ONE_TABLE
    without = replace(plan, workers=[lender.description, replace(head, shared_weight_bytes=0)])
    assert without.shared == 0
