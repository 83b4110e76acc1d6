"""Rotary position embedding against transformers, and what a `config.json` may say of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import ModelConfig, RopeConfig
from slipstream.services.models.decoder import paired_dimensions, rotation_table
from slipstream.services.models.json_files import ConfigFields
from tests.harness.checkpoints import FAMILIES
from tests.harness.sampling import examples

SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
HEAD_DIM = 128
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHORT = [1.0 + 0.01 * pair for pair in range(48)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": [40.0] * 48}
PHI4_MINI = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE}


def read(family: str, changes: dict[str, Any]) -> ModelConfig:
    config = {name: value for name, value in FAMILIES[family].items() if name not in ("rope_parameters", "head_dim")}
    fields = ConfigFields(Path("there"), config | SIZES | changes)
    return ModelConfig.from_fields(fields, config["architectures"][0])


def assert_same(rope: RopeConfig, theirs: Any) -> None:
    """The table is that of transformers; `theirs` is the model's configuration there."""
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](
        theirs, torch.device("cpu")
    )
    table, num_pairs = rotation_table(rope, HEAD_DIM), len(frequencies)
    assert table.shape == (2, HEAD_DIM // 2)
    torch.testing.assert_close(table[0, :num_pairs], frequencies, atol=0, rtol=1e-6)
    torch.testing.assert_close(table[1, :num_pairs], torch.full((num_pairs,), attention_factor))
    assert not table[0, num_pairs:].any()
    assert bool((table[1, num_pairs:] == 1).all())


@settings(max_examples=examples(200), deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "factor": st.sampled_from([0.5, 1.0, 4, 40.0]) | st.floats(1, 100),
            "original_max_position_embeddings": st.sampled_from([1, 16, 4096, 32768]),
        },
        optional={
            "attention_factor": st.floats(0.1, 2),
            "mscale": st.floats(0.1, 2),
            "mscale_all_dim": st.floats(0.1, 2),
            "beta_fast": st.sampled_from([32, 16.0, 1000, None]),
            "beta_slow": st.sampled_from([1, 2, 0.5, 16, None]),
            "truncate": st.booleans(),
        },
    ),
    st.sampled_from([10000.0, 1000000, 150000, 1.5]),
)
@example({"factor": 4.0, "original_max_position_embeddings": 32768}, 1e6)
@example({"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}, 1e4)
def test_yarn_is_that_of_transformers(given: dict[str, Any], theta: float) -> None:
    scaling = {"rope_type": "yarn", **given}
    config = read("llama", {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 131072})
    theirs = LlamaConfig(**SIZES, max_position_embeddings=131072, rope_parameters={"rope_theta": theta, **scaling})
    assert_same(config.rope, theirs)


@pytest.mark.parametrize("beside", [{}, {"factor": 8.0}, {"attention_factor": 1.25}])
def test_longrope_of_a_part_is_that_of_transformers(beside: dict[str, Any]) -> None:
    changes = PHI4_MINI | {"rope_scaling": LONGROPE | beside, "partial_rotary_factor": 0.75}
    config = read("phi3", changes)
    assert config.rope.rotary_dim(HEAD_DIM) == 96
    assert_same(config.rope, Phi3Config(**SIZES, **changes))


def test_longrope_had_another_name() -> None:
    changes = PHI4_MINI | {"partial_rotary_factor": 0.75}
    renamed = changes | {"rope_scaling": {**LONGROPE, "rope_type": None, "type": "su"}}
    assert read("phi3", renamed) == read("phi3", changes)


def test_original_positions_beside_the_other_fields_go_first() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for nested, beside, expected in ((64, None, 64), (64, 32, 32), (None, 32, 32), (None, None, 512)):
        original = {"original_max_position_embeddings": nested} if nested is not None else {}
        config = read("llama", {"rope_scaling": scaling | original, "original_max_position_embeddings": beside})
        assert config.rope.original_max_position_embeddings == expected


def test_attn_factor_goes_beside_what_is_inferred() -> None:
    without, with_it = (read("qwen3", {"rope_scaling": YARN | more}).rope for more in ({}, {"attn_factor": 0.5}))
    assert without.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert with_it.attention_factor == pytest.approx(0.5 * without.attention_factor)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3", {"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ("qwen2", {"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ("qwen3", {"max_position_embeddings": 160000, "rope_scaling": YARN}, 160000),
        ("phi3", PHI4_MINI | {"partial_rotary_factor": 0.75}, 4096),
        ("llama", {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
    ],
)
def test_positions_that_may_be_used(family: str, changes: dict[str, Any], expected: int) -> None:
    assert read(family, changes).max_position_embeddings == expected


def test_pairs_are_those_of_the_checkpoint() -> None:
    order = paired_dimensions(RopeConfig(partial_rotary_factor=0.5), 8).tolist()
    assert order == [0, 1, 4, 5, 2, 3, 6, 7]
    assert paired_dimensions(RopeConfig(), 6).tolist() == [0, 1, 2, 3, 4, 5]


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": YARN | changes}


def longrope(**changes: Any) -> dict[str, Any]:
    return PHI4_MINI | {"rope_scaling": LONGROPE | changes, "partial_rotary_factor": 0.75}


POSITIVE = "supported: a positive number"
EVEN_PART = "supported: a part of head_dim = 128 that has an even number of dimensions"


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {"rope_scaling": {"type": "yarn"}}, f"rope_scaling.factor: got None, {POSITIVE}"),
        ("llama", yarn(factor=-1), f"rope_scaling.factor: got -1, {POSITIVE}"),
        (
            "llama",
            yarn(factor=1e6),
            "rope_scaling.factor: got 1000000.0, supported: at most 512 with original_max_position_embeddings = 32768",
        ),
        (
            "llama",
            yarn(original_max_position_embeddings=None),
            "rope_scaling.original_max_position_embeddings: got None, supported: an integer from 1 to 16777216",
        ),
        ("qwen3", yarn(beta_fast=0), f"rope_scaling.beta_fast: got 0, {POSITIVE}"),
        ("qwen3", yarn(beta_slow="1"), f"rope_scaling.beta_slow: got '1', {POSITIVE}"),
        ("qwen3", yarn(beta_slow=64), "rope_scaling.beta_fast: got None, supported: at least beta_slow = 64"),
        ("qwen3", yarn(attention_factor=0.0), f"rope_scaling.attention_factor: got 0.0, {POSITIVE}"),
        ("qwen3", yarn(attn_factor=math.nan), f"rope_scaling.attn_factor: got nan, {POSITIVE}"),
        ("qwen3", yarn(mscale=[], mscale_all_dim=1), f"rope_scaling.mscale: got [], {POSITIVE}"),
        ("qwen3", yarn(truncate="no"), "rope_scaling.truncate: got 'no', supported: true or false"),
        ("qwen3", yarn(rope_theta=1.0), "rope_scaling.rope_theta: got 1.0, supported: more than 1"),
        ("qwen3", yarn(partial_rotary_factor=0.5), "rope_scaling.partial_rotary_factor: got 0.5, supported: 1"),
        ("phi3", {"partial_rotary_factor": 0}, f"rope_parameters.partial_rotary_factor: got 0, {POSITIVE}"),
        ("phi3", {"partial_rotary_factor": 1e300}, f"rope_parameters.partial_rotary_factor: got 1e+300, {EVEN_PART}"),
        ("phi3", {"partial_rotary_factor": 0.745}, f"rope_parameters.partial_rotary_factor: got 0.745, {EVEN_PART}"),
        ("phi3", {"partial_rotary_factor": 0.001}, f"rope_parameters.partial_rotary_factor: got 0.001, {EVEN_PART}"),
        ("phi3", longrope(short_factor=None), "rope_scaling.short_factor: got None, supported: 48 positive numbers"),
        ("phi3", longrope(short_factor=[1]), "rope_scaling.short_factor: got [1], supported: 48 positive numbers"),
        (
            "phi3",
            longrope() | {"original_max_position_embeddings": 1},
            "original_max_position_embeddings: got 1, supported: 2 or more",
        ),
    ],
)
def test_bad_values(family: str, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(family, changes)
    assert str(caught.value) == f"there: config.json: {expected}"


@pytest.mark.parametrize("value", [0, -1.0, None, "1", True, math.inf])
def test_a_short_factor_that_is_none(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"rope_scaling.short_factor: got .*, supported: 48 positive numbers"):
        read("phi3", longrope(short_factor=[*SHORT[1:], value]))
