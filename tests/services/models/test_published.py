"""Published models: what of them loads, and the tables in docs/models.md, which this file makes when it is run.

`published.json` has the fields that matter of each model's `config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.common.errors import CheckpointError
from slipstream.services.models.config import FAMILIES, ModelConfig
from slipstream.services.models.decoder import Decoder
from tests.harness.checkpoints import write_json

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN = "<!-- made by: python -m tests.services.models.test_published -->"
END = "<!-- end of the tables -->"
META = torch.device("meta")


def outcome(model: dict[str, Any], **changes: Any) -> ModelConfig | str:
    """The model's configuration, or the field for which it is refused and what is given there."""
    with TemporaryDirectory() as name:
        write_json(Path(name) / "config.json", model | changes)
        try:
            return ModelConfig.from_directory(name)
        except CheckpointError as error:
            return str(error).removeprefix(f"{name}: config.json: ").partition(", supported: ")[0]


OUTCOMES = {name: outcome(model) for name, model in MODELS.items()}
LOADED = {name: config for name, config in OUTCOMES.items() if isinstance(config, ModelConfig)}
REFUSED = {name: reason for name, reason in OUTCOMES.items() if isinstance(reason, str)}


def num_parameters(module: torch.nn.Module) -> int:
    """Numbers in all weights; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def tables() -> str:
    """Makes the tables of models that load and of those that are refused."""
    rows = ["| loads | architecture | parameters | RoPE | window | most tokens |", "|---|---|---|---|---|---|"]
    for name, config in LOADED.items():
        size = num_parameters(Decoder(config, device=META, dtype=torch.float32)) / 1e9
        window = next((window for window in config.sliding_windows if window is not None), None)
        is_seen = window is not None and window < config.max_position_embeddings
        rope, part = f"`{config.rope.rope_type}`", config.rope.partial_rotary_factor
        rope += f" of {part:.0%} of a head" if part < 1 else ""
        tokens = f"{config.max_position_embeddings:,}"
        some = " of some layers" if None in config.sliding_windows else ""
        seen = f"{window:,}{some}" if is_seen else "–"
        rows.append(
            f"| {name} | `{config.text_of or config.architecture}` | {size:.1f} billion | {rope} | {seen} | {tokens} |"
        )
    rows += ["", "| refused | for |", "|---|---|"]
    rows += [f"| {name} | `{reason}` |" for name, reason in REFUSED.items()]
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page
    assert filled(page) == page, "run python -m tests.services.models.test_published"


def test_every_family_is_there() -> None:
    assert {config.architecture for config in LOADED.values()} == set(FAMILIES)


def of_one_layer(model: dict[str, Any]) -> dict[str, Any]:
    """The model's settings, or those of its text part, without all layers but the first."""
    if "text_config" in model:
        return model | {"text_config": of_one_layer(model["text_config"])}
    by_layer = {name: model[name][:1] for name in ("layer_types", "no_rope_layers") if name in model}
    return model | by_layer | {"num_hidden_layers": 1}


@pytest.mark.parametrize("name", LOADED)
def test_a_model_has_the_weights_that_it_has_in_transformers(name: str, tmp_path: Path) -> None:
    one_layer = of_one_layer(MODELS[name])
    write_json(tmp_path / "config.json", one_layer)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path).get_text_config())
    config = outcome(one_layer)
    assert isinstance(config, ModelConfig)
    assert num_parameters(Decoder(config, device=META, dtype=torch.float32)) == num_parameters(theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_model_is_refused_for_what_it_is(name: str) -> None:
    model, reason = MODELS[name], REFUSED[name]
    if "quantization_config" in model:
        assert reason.startswith("quantization_config.")
    else:
        assert reason == f"architectures: got {model['architectures']}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
