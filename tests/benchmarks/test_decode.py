"""Decode steps are measured with each drafter, and their bytes counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.benchmarks.decode import Plan, StepBytes, measure
from slipstream.benchmarks.figures import decode_medians
from slipstream.benchmarks.models import DFLASH, EAGLE, EAGLE3, MTP, NGRAM, ONE, PLAIN, SHAPES, STANDALONE, THREE, Setup
from slipstream.benchmarks.runner import Row, Table

SMALL = {
    "vocab_size": 4096,
    "eos_token_id": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}
"""Sizes of a small pair of models, in place of those of Llama-3.1-8B and its drafts."""
LAYER, OUTPUT = 218_112_000, 128_256 * 4096
"""Parameters of a layer of Llama-3.1-8B, with two norms, and of its output."""
FUSING = 2 * 4096 * 4096
LLAMA_1B = 1_235_814_400
"""Parameters of Llama-3.2-1B, whose embedding is its output, too."""
KV_BYTES = 2 * 2 * 8 * 128
"""Bytes of the keys and values of a token in one layer of Llama-3.1-8B, in bfloat16."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "algorithm", "draft", "parameters", "kv_bytes"),
    [
        ("llama-3.1-8b-standalone", STANDALONE, "standalone-llama-3.1-8b", 4 * LLAMA_1B, 4 * 16 * 2 * 2 * 8 * 64),
        ("llama-3.1-8b-eagle", EAGLE, "eagle-llama-3.1-8b", 4 * (LAYER + FUSING + OUTPUT), 4 * KV_BYTES),
        ("llama-3.1-8b-mtp", MTP, "mtp-llama-3.1-8b", 4 * (LAYER + FUSING + OUTPUT), 4 * KV_BYTES),
        ("llama-3.1-8b-dflash", DFLASH, "dflash-llama-3.1-8b", 5 * (LAYER + 4096**2) + OUTPUT, 5 * KV_BYTES),
        ("llama-3.1-8b-ngram", NGRAM, None, 0, 4),
    ],
)
def test_bytes_that_a_draft_reads(name: str, algorithm: str, draft: str | None, parameters: int, kv_bytes: int) -> None:
    setup = Setup.named(name)
    assert (setup.algorithm, setup.target.name, setup.draft and setup.draft.name) == (algorithm, "llama-3.1-8b", draft)
    found = StepBytes.of(setup, num_draft_tokens=4, dtype=torch.bfloat16)
    assert found.draft_weights == pytest.approx(2 * parameters, rel=1e-4)  # norms are small
    assert (found.draft_kv_per_token, found.verify_kv_per_token) == (kv_bytes, 32 * KV_BYTES)


def test_bytes_of_experts_are_of_those_that_are_chosen() -> None:
    found = StepBytes.of(Setup.named("qwen3-30b-a3b"), num_draft_tokens=4, dtype=torch.bfloat16)
    assert found.verify_experts == 2 * 48 * 128 * 3 * 2048 * 768
    one, more = (found.draft_and_verify(0, 1, num_verified)[1] - found.verify_weights for num_verified in (1, 5))
    assert one == pytest.approx(found.verify_experts * 8 / 128)
    assert one < more < 5 * one


def test_a_shape_without_a_drafts_name_has_an_eagle3_head() -> None:
    setup = Setup.named("llama-3.1-8b")
    assert (setup.algorithm, setup.draft and setup.draft.name) == (EAGLE3, "eagle3-llama-3.1-8b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "modes"),
    [(("small-standalone", "small-eagle", "small-dflash", "small-ngram"), (THREE,)), (("small-ngram",), (THREE, ONE))],
)
async def test_steps_with_each_drafter(
    shapes: tuple[str, ...], modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES["dflash-llama-3.1-8b"]["dflash_config"], "mask_token_id", 4095)
    monkeypatch.setitem(SHAPES["dflash-llama-3.1-8b"]["dflash_config"], "target_layer_ids", [1, 2])
    for name in ("llama-3.1-8b", *(f"{draft}-llama-3.1-8b" for draft in ("standalone", "eagle", "dflash"))):
        layers = {"num_hidden_layers": min(4, SHAPES[name]["num_hidden_layers"])}
        monkeypatch.setitem(SHAPES, name.replace("llama-3.1-8b", "small"), SHAPES[name] | SMALL | layers)
    group, table = [(shape, mode) for shape in shapes for mode in modes], Table(None, "shape")
    await measure(Plan(device="cpu", batches="2", repeats=1), group, None, table)
    measured = [(row["shape"], row["mode"], row["ranks"], row["batch"], row["repeat"]) for row in table.rows]
    assert measured == [(shape, mode, 1, 2, 0) for shape, mode in group]
    for row in table.rows:
        assert row["draft_ms"] > 0
        assert row["mean_accept_length"] == pytest.approx(3.5, abs=0.4)
        assert ("draft" in row["cpu_ms"]) == (row["mode"] == THREE)


def test_shapes_and_modes_that_take_turns() -> None:
    assert Plan(shapes="a,b").groups() == [[("a", THREE), ("a", ONE)], [("b", THREE), ("b", ONE)]]
    assert Plan(shapes="a,b", plain=True).groups() == [[("a", PLAIN), ("b", PLAIN)]]
    assert Plan(shapes="a,b", alone=True).groups() == [[("a", THREE), ("b", THREE)]]


THREE_ROW: Row = {
    "shape": "small",
    "mode": THREE,
    "batch": 1,
    "step_ms": 5.0,
    "draft_ms": 1.0,
    "verify_ms": 3.9,
    "bubble_ms": 0.1,
    "draft_floor_ms": 0.5,
    "verify_floor_ms": 3.0,
    "tokens_per_second": 700.0,
    "cpu_ms": {"draft": 0.6, "verify": 0.7, "scheduler": 1.25, "step-loop": 0.5},
}
ONE_ROW = THREE_ROW | {"mode": ONE, "step_ms": 4.0}


def test_medians_compare_both_modes() -> None:
    others = [THREE_ROW | {"shape": "other", "mode": mode} for mode in (PLAIN, THREE)]
    (found,) = decode_medians([THREE_ROW, ONE_ROW, *others], "small")
    assert {name: found[name] for name in ("batch", "repeats", "step_ms", "one_process_ms", "ratio")} == {
        "batch": 1,
        "repeats": 1,
        "step_ms": 5.0,
        "one_process_ms": 4.0,
        "ratio": 1.25,
    }
    assert found["overlap_efficiency"] == pytest.approx(0.98)
    assert (found["verify_over_floor"], found["draft_over_floor"], found["cpu_loop"]) == ("1.30", "2.00", "0.50")


def test_medians_of_what_some_repeats_lack_are_those_of_the_others() -> None:
    without = THREE_ROW | {"cpu_ms": {"verify": 0.9}, "draft_floor_ms": None, "verify_floor_ms": None}
    (found,) = decode_medians([without, THREE_ROW, ONE_ROW], "small")
    assert (found["cpu_draft"], found["draft_over_floor"]) == ("0.60", "2.00")
    (found,) = decode_medians([without, ONE_ROW], "small")
    assert (found["cpu_draft"], found["cpu_verify"], found["draft_over_floor"]) == ("", "0.90", "")
