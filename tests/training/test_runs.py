"""The target and both drafts, trained for some steps at a small size: losses fall, and what is written is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.worker.config import WorkerConfig
from slipstream.training import checkpoint, distil, distil_dflash, distil_eagle, distil_eagle3, distil_mtp, target
from slipstream.training.divergence import TEMPERATURE, SharedOutputLoss
from slipstream.training.llama import LlamaShape
from slipstream.training.run import LOG_EVERY_STEPS
from tests.harness.checkpoints import write_tokenizer

pytestmark = pytest.mark.slow

NUM_STEPS = 2 * LOG_EVERY_STEPS + 1
CONTEXT_TOKENS = 32
BATCH = 4
DRAFTS = ("standalone", "eagle3", "eagle", "dflash", "mtp")
PERIOD = 50
"""After so many tokens the text begins again: it can be learned."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, the target's samples, and a tokenizer."""
    path = tmp_path_factory.mktemp("training")
    text = np.arange(4 * PERIOD * CONTEXT_TOKENS, dtype=np.uint16) % PERIOD
    for name in ("train", "heldout"):
        np.save(path / f"{name}.npy", text)
    np.save(path / "samples.npy", text[: 20 * (CONTEXT_TOKENS + 1)].reshape(20, -1))
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Any]:
    """The log of each trained model, by the name of the model's folder."""
    own: dict[str, Any] = {"batch": BATCH, "minutes": 60.0, "device": "cpu", "seed": 3}
    num_batches = (4 * PERIOD * CONTEXT_TOKENS - 2 * CONTEXT_TOKENS) // CONTEXT_TOKENS // BATCH
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "CONTEXT_TOKENS", CONTEXT_TOKENS)
        patch.setattr(checkpoint, "TARGET", small(num_layers=6))
        patch.setattr(checkpoint, "STANDALONE", small(num_layers=1))
        out, log = folder / "target", folder / "target.json"
        target.main(folder, folder, out, log, epochs=NUM_STEPS / num_batches, **own)
        data, out, log = [folder / "train.npy", folder / "samples.npy"], folder / "eagle3", folder / "eagle3.json"
        sizes = {"length": CONTEXT_TOKENS, "rate": 4e-3, "draft_vocab": 3584}
        distil_eagle3.main(folder / "target", data, out, log, steps=NUM_STEPS, **own | sizes | {"batch": 3 * BATCH})
        for name, module in (("standalone", distil), ("eagle", distil_eagle), ("dflash", distil_dflash)):
            out, log = folder / name, folder / f"{name}.json"
            module.main(folder, [folder / "samples.npy"], folder / "target", out, log, steps=NUM_STEPS, **own)
        out, log = folder / "mtp", folder / "mtp.json"
        distil_mtp.main(folder, [folder / "samples.npy"], folder / "target", out, log, steps=2 * NUM_STEPS, **own)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("target", *DRAFTS)}


def small(num_layers: int) -> LlamaShape:
    """A decoder with one narrow head."""
    return LlamaShape(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=1,
        num_key_value_heads=1,
    )


def test_the_target_learns_the_text(trained: dict[str, Any]) -> None:
    settings, log = trained["target"]["settings"], trained["target"]["log"]
    assert settings["seed"] == 3
    assert [record["step"] for record in log] == [LOG_EVERY_STEPS, 2 * LOG_EVERY_STEPS, NUM_STEPS]
    assert [record["tokens"] for record in log] == [record["step"] * BATCH * CONTEXT_TOKENS for record in log]
    assert log[0]["heldout_loss"] > log[-1]["heldout_loss"] + 0.5
    assert log[0]["loss"] > log[-1]["loss"] + 0.5


@pytest.mark.parametrize("name", ["standalone", "eagle3", "eagle", "dflash"])
def test_a_draft_comes_closer_to_the_target(trained: dict[str, Any], name: str) -> None:
    log = trained[name]["log"]
    assert [record["step"] for record in log] == [LOG_EVERY_STEPS, 2 * LOG_EVERY_STEPS]
    assert log[0]["seconds"] < log[1]["seconds"]
    for source in ("text", "own") if name != "eagle3" else ("text",):
        assert log[0][f"{source}_loss"] > log[1][f"{source}_loss"]
        overlaps = log[1][f"{source}_overlap"]
        assert np.shape(overlaps) == {"standalone": (), "eagle3": (5,), "eagle": (4,), "dflash": (7,)}[name]
        # Blocks are learnt more slowly than what follows on known tokens.
        assert np.all(np.greater(overlaps, 0.3 if name == "dflash" else 0.85))


def test_modules_come_closer_to_the_target_together_and_then_apart(trained: dict[str, Any]) -> None:
    log = trained["mtp"]["log"]
    together, apart = log[:1], log[1:]
    assert [record["step"] for record in together] == [LOG_EVERY_STEPS]
    assert [record["step"] for record in apart] == [LOG_EVERY_STEPS, 2 * LOG_EVERY_STEPS]
    for source in ("text", "own"):
        assert together[0][f"{source}_loss"] > apart[-1][f"{source}_loss"]
        overlaps = apart[-1][f"{source}_overlap"]
        assert np.shape(overlaps) == (distil_mtp.NUM_MODULES,)
        assert np.all(np.greater(overlaps, 0.85))


def test_the_loss_of_a_shared_output_is_that_of_the_logits() -> None:
    """In parts of three rows; the gradient, too."""
    generator = torch.Generator().manual_seed(1)
    student, teacher, output = (torch.randn(size, 6, generator=generator) for size in (8, 8, 11))
    results = []
    for is_whole in (False, True):
        state = student.clone().requires_grad_()
        if is_whole:
            loss, overlap = distil.divergence_of_logits(state @ output.T, teacher @ output.T, 0.7)
        else:
            loss, overlap = SharedOutputLoss.apply(state, teacher, output, TEMPERATURE, 0.7, 3)  # type: ignore[no-untyped-call]
        (2 * loss).backward()
        results.append((loss.detach(), overlap.detach(), state.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_trained_model_can_be_served(trained: dict[str, Any], folder: Path) -> None:
    assert set(trained) == {"target", *DRAFTS}
    verify = make_verify(WorkerConfig(model=folder / "target"), HostDevice(), 0).description
    for name in DRAFTS:
        config = WorkerConfig(model=folder / name, algorithm=name, target=folder / "target")
        draft = make_draft(config, HostDevice(), 0).description
        draft.check_fits(verify)
        assert draft.algorithm == name
