"""Configurations: what is read from a checkpoint's two JSON files, what is refused, and RoPE as transformers has it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import ModelConfig, RopeConfig
from slipstream.services.models.decoder import paired_dimensions, rotation_table
from slipstream.services.models.families import FAMILIES as ARCHITECTURES
from slipstream.services.models.families import TEXT_PARTS
from slipstream.services.models.json_files import ConfigFields
from tests.harness.checkpoints import FAMILIES, LLAMA, refusal, write_json
from tests.harness.mutations import INFINITY, NAN
from tests.harness.sampling import examples


def write_config(path: Path, changes: dict[str, Any], family: str = "llama") -> Path:
    config = {name: value for name, value in (FAMILIES[family] | changes).items() if value != "absent"}
    write_json(path / "config.json", config)
    return path


def config_error(path: Path) -> str:
    return refusal(path, ModelConfig.from_directory)


def test_all_fields(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(write_config(tmp_path, {}))
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=272,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope=RopeConfig(),
        tie_word_embeddings=False,
        eos_token_ids=frozenset({257}),
        score_scale=0.25,
    )
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * 2 * 2 * 16 * 4


def test_older_files_leave_fields_out(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "head_dim": "absent",
        "num_key_value_heads": "absent",
        "rope_parameters": "absent",
    }
    changes |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = ModelConfig.from_directory(write_config(tmp_path, changes))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert config.rope == RopeConfig(rope_type="linear", theta=500.0, factor=2.0)


@pytest.mark.parametrize(
    ("config_id", "generation", "expected"),
    [
        (7, None, {7}),
        ([7, 8], None, {7, 8}),
        (None, None, set()),
        (7, {}, {7}),
        (7, {"eos_token_id": None}, {7}),
        (7, {"eos_token_id": 9}, {9}),
        (7, {"eos_token_id": [9, 10, 11]}, {9, 10, 11}),
    ],
)
def test_end_tokens(tmp_path: Path, config_id: object, generation: object, expected: set[int]) -> None:
    write_config(tmp_path, {"eos_token_id": config_id})
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == expected


def test_where_dual_chunk_attention_would_begin_a_text_ends(tmp_path: Path) -> None:
    dual = {"chunk_size": 16, "local_size": 4, "original_max_position_embeddings": 32}
    path = write_config(tmp_path, {"dual_chunk_attention_config": dual})
    assert ModelConfig.from_directory(path).max_position_embeddings == 32


def test_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "there" / "is" / "none"
    assert config_error(path) == "no such directory; supported: a local Hugging Face checkpoint directory"


def test_no_config(tmp_path: Path) -> None:
    assert config_error(tmp_path) == "config.json is missing; supported: a Hugging Face checkpoint directory"


def test_config_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": [')
    assert config_error(tmp_path).startswith("cannot read config.json: Expecting value")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert config_error(tmp_path).startswith("cannot read config.json: 'utf-8' codec")


MODELS = f"{', '.join(ARCHITECTURES)}, the text part of {', '.join(TEXT_PARTS)}"
LLAMA3 = LLAMA["rope_parameters"] | {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = ["sliding_attention", "full_attention"]
COUNT, POSITIVE = "an integer from 1 to {}", "a positive number"
TOKEN = "a token id below vocab_size = 272, or a list of them"
METHODS = "compressed-tensors, awq, fp8, gptq, mxfp4"


@pytest.mark.parametrize(
    ("family", "name", "value", "accepted"),
    [
        ("llama", "architectures", ["GPT2LMHeadModel"], MODELS),
        (
            *("llama", "architectures", ["LlamaForCausalLMEagle3"]),
            f"{MODELS}; an EAGLE-3 head is a draft, with --algorithm eagle3",
        ),
        ("llama", "architectures", ["LlamaModel"], MODELS),
        ("llama", "architectures", None, MODELS),
        ("llama", "hidden_act", "gelu", "'silu'"),
        ("llama", "num_hidden_layers", 0, COUNT.format(1024)),
        ("llama", "num_hidden_layers", 10**7, COUNT.format(1024)),
        ("llama", "rms_norm_eps", 0.0, POSITIVE),
        ("llama", "rms_norm_eps", INFINITY, POSITIVE),
        ("llama", "rms_norm_eps", NAN, POSITIVE),
        ("llama", "num_key_value_heads", 3, "a divisor of num_attention_heads = 4"),
        ("llama", "num_key_value_heads", True, COUNT.format(4096)),
        ("llama", "num_attention_heads", 2**31, COUNT.format(4096)),
        ("llama", "head_dim", 15, "an even number"),
        ("llama", "head_dim", 2**40, COUNT.format(4096)),
        ("llama", "max_position_embeddings", 2**40, COUNT.format(16777216)),
        ("llama", "vocab_size", 2**32, COUNT.format(16777216)),
        ("llama", "hidden_size", -64, COUNT.format(131072)),
        ("llama", "intermediate_size", 10**30, COUNT.format(1048576)),
        *(("llama", "eos_token_id", value, TOKEN) for value in (-1, 272, [257, -1], [True], {"id": 2})),
        ("llama", "sliding_window", 7, "none with this architecture"),
        ("mistral", "sliding_window", 0, COUNT.format(16777216)),
        ("mistral", "layer_types", LAYERS, "full_attention, the same for all layers of this architecture"),
        ("qwen3", "layer_types", ["full_attention", "chunked_attention"], "full_attention, sliding_attention"),
        ("qwen3", "model_type", "qwen3_moe", "'qwen3', as architectures says"),
        *(
            ("qwen2", "architectures", [name], MODELS)
            for name in ("PhiMoEForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM")
        ),
    ],
)
def test_unsupported_field(tmp_path: Path, family: str, name: str, value: object, accepted: str) -> None:
    message = config_error(write_config(tmp_path, {name: value}, family))
    assert message == f"config.json: {name}: got {value!r}, supported: {accepted}"


@pytest.mark.parametrize("family", FAMILIES)
def test_methods_that_no_family_may_have(tmp_path: Path, family: str) -> None:
    for method in ("aqlm", "bitsandbytes"):
        path = write_config(tmp_path, {"quantization_config": {"quant_method": method}}, family)
        expected = f"config.json: quantization_config.quant_method: got '{method}', supported: {METHODS}"
        assert config_error(path) == expected


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        *(
            ("llama", {"rope_parameters": rope}, f"rope_parameters.{expected}")
            for rope, expected in (
                (
                    LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
                    "high_freq_factor: got 4.0, supported: more than low_freq_factor = 4",
                ),
                (
                    LLAMA["rope_parameters"] | {"partial_rotary_factor": 0.5},
                    "partial_rotary_factor: got 0.5, supported: 1",
                ),
                (
                    {"rope_type": "linear", "rope_theta": 1e4, "factor": 0},
                    f"factor: got 0, supported: {POSITIVE}",
                ),
                (
                    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
                    "full_attention: got {'rope_theta': 10000.0, 'rope_type': 'default'}, "
                    "supported: the same fields for all layers",
                ),
            )
        ),
        *(
            (
                *(family, {"rope_parameters": None, "rope_scaling": {"type": name, "factor": 4.0}}),
                f"rope_scaling.type: got '{name}', supported: default, linear, llama3, yarn",
            )
            for family, name in (("llama", "dynamic"), ("qwen3", "longrope"))
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type: got 'yarn', supported: default, longrope",
        ),
        (
            *("llama", {"dual_chunk_attention_config": {"chunk_size": 8}}),
            f"dual_chunk_attention_config.original_max_position_embeddings: got None, supported: {COUNT.format(2**24)}",
        ),
        (
            *("qwen2", {"layer_types": LAYERS}),
            "use_sliding_window: got False, supported: true, as layer_types has sliding_attention",
        ),
        (
            *("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 6}),
            "hidden_size: got 64, supported: a multiple of num_attention_heads = 6",
        ),
        (
            *("llama", {"rms_norm_eps": 10**400}),
            f"rms_norm_eps: got 100000000000000000...0000000000000000000, supported: {POSITIVE}",
        ),
    ],
)
def test_unsupported_fields(tmp_path: Path, family: str, changes: dict[str, Any], expected: str) -> None:
    assert config_error(write_config(tmp_path, changes, family)) == f"config.json: {expected}"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_parameters": LLAMA3}, "low_freq_factor"),
        ({"rope_parameters": "none"}, "rope_parameters"),
        ({"model_type": "llamas"}, "llamas"),
        ({"hidden_size": 66, "head_dim": "absent"}, "66"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
    ],
)
def test_field_of_a_wrong_kind(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    message = config_error(write_config(tmp_path, changes))
    assert message.startswith("config.json")
    assert named in message


class Reference:
    """The same configuration as transformers reads it."""

    def __init__(self, path: Path) -> None:
        config = AutoConfig.from_pretrained(path)
        windows = [
            config.sliding_window if layer_type == "sliding_attention" else None
            for layer_type in getattr(config, "layer_types", None) or ()
        ]
        if config.model_type in ("mistral", "phi3"):
            windows = [config.sliding_window] * config.num_hidden_layers
        rope = config.rope_parameters
        context_tokens = config.max_position_embeddings
        if rope["rope_type"] == "yarn":
            context_tokens = max(context_tokens, int(rope["factor"] * rope["original_max_position_embeddings"]))
        if rope["rope_type"] == "longrope":
            context_tokens = min(context_tokens, rope["original_max_position_embeddings"])
        self.values = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
            "intermediate_size": config.intermediate_size,
            "rms_norm_eps": config.rms_norm_eps,
            "max_position_embeddings": context_tokens,
            "tie_word_embeddings": config.tie_word_embeddings,
            "has_qkv_bias": getattr(config, "attention_bias", config.model_type == "qwen2"),
            "has_output_bias": getattr(config, "attention_bias", False),
            "has_mlp_bias": getattr(config, "mlp_bias", False),
            "sliding_windows": tuple(windows) if any(windows) else (),
            "eos_token_ids": frozenset([] if config.eos_token_id is None else [config.eos_token_id]),
        }
        self.rope = {"rope_type": rope["rope_type"], "theta": rope["rope_theta"]}
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        self.rope |= {name: rope[name] for name in names if rope["rope_type"] != "default" and name in rope}


_ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_parameters": None},
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 1e6, "original_max_position_embeddings": 64}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}},
)
_PHI3_ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 250000},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}}
    | {"partial_rotary_factor": 0.75, "num_attention_heads": 4, "hidden_size": 64},
)
_WINDOWS: tuple[dict[str, Any], ...] = (
    {},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    {"use_sliding_window": True, "sliding_window": None},
    {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_are_left_out_are_as_in_transformers(tmp_path: Path, family: str) -> None:
    optional = sorted(set(FAMILIES[family]) - {"architectures", "model_type", "num_hidden_layers"})
    window_sets = _WINDOWS if family.startswith("qwen") else ({}, {"sliding_window": 9})[: 1 + (family != "llama")]
    ropes = _PHI3_ROPES if family == "phi3" else _ROPES

    @settings(max_examples=examples(60), deadline=None)
    @given(st.sets(st.sampled_from(optional)), st.sampled_from(ropes), st.sampled_from(window_sets))
    @example(set(), {}, {})
    @example(set(optional), {}, {})
    def check(absent: set[str], rope: dict[str, Any], windows: dict[str, Any]) -> None:
        values = {name: value for name, value in FAMILIES[family].items() if name not in absent | {"rope_parameters"}}
        write_json(tmp_path / "config.json", values | rope | windows)
        try:
            expected = Reference(tmp_path)
        except ValueError:  # such as a hidden size that the heads do not divide
            assume(False)
        assume(expected.values["num_heads"] % expected.values["num_kv_heads"] == 0)
        assume(all(token < expected.values["vocab_size"] for token in expected.values["eos_token_ids"]))
        # Pairs of dimensions are rotated: of an odd part transformers only fails when it runs.
        assume(int(expected.values["head_dim"] * rope.get("partial_rotary_factor", 1)) % 2 == 0)
        config = ModelConfig.from_directory(tmp_path)
        assert {name: getattr(config, name) for name in expected.values} == expected.values
        assert {name: getattr(config.rope, name) for name in expected.rope} == expected.rope

    check()


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    code = (
        "import sys; from slipstream.services.models.checkpoint import ModelConfig;"
        f"ModelConfig.from_directory({str(tmp_path)!r}); print('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


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
