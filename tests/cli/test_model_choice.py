"""Models that are served when only some are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from slipstream import bundled
from slipstream.cli.models import ModelChoice, ModelOptions
from slipstream.common.errors import ConfigError
from tests.harness.eagle3_checkpoints import ALGORITHMS, LAYOUTS, SPECULATORS, write_head

if TYPE_CHECKING:
    from pathlib import Path


def choose(**given: Any) -> ModelChoice:
    """Returns the model choice for these options."""
    return ModelOptions(**given).choose()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model's."""
    (tmp_path / "config.json").touch()
    return tmp_path


@pytest.fixture
def _bundled_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "standalone", "eagle3", "eagle", "mtp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
        monkeypatch.setattr(bundled, f"{name}_dir", lambda name=name: tmp_path / name)


@pytest.mark.usefixtures("_bundled_models")
def test_without_options_the_bundled_pair() -> None:
    chosen = choose()
    assert (chosen.target, chosen.draft, chosen.algorithm) == (
        bundled.target_dir(),
        bundled.standalone_dir(),
        "standalone",
    )
    for algorithm in ("eagle3", "eagle", "mtp"):
        head = choose(algorithm=algorithm)
        assert (head.draft, head.algorithm) == (bundled.target_dir().with_name(algorithm), algorithm)
    none = choose(algorithm="none")
    assert (none.draft, none.has_draft) == (None, False)
    lookup = choose(algorithm="ngram", num_draft_tokens=3)
    assert (lookup.target, lookup.draft, lookup.has_draft) == (bundled.target_dir(), None, True)
    assert choose(num_draft_tokens=2).num_draft_tokens == 2


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ('{"architectures": ["LlamaForCausalLMEagle3"]}', "eagle3"),
        ('{"speculators_model_type": "eagle3"}', "eagle3"),
        ('{"architectures": ["LlamaForCausalLM"]}', "standalone"),
        ("[]", "standalone"),
        ("\ufeff{", "standalone"),
    ],
)
def test_a_draft_may_say_what_it_is(model: Path, config: str, algorithm: str) -> None:
    (model / "config.json").write_text(config, encoding="utf-8")
    assert choose(target=model, draft=model).algorithm == algorithm
    assert choose(target=model, draft=model, algorithm="mtp").algorithm == "mtp"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_heads_tensors_say_what_it_is(tmp_path: Path, layout: str) -> None:
    head = write_head(tmp_path, layout=layout, architectures=["LlamaForCausalLM"])
    assert choose(target=head, draft=head).algorithm == ALGORITHMS[layout]
    (head / "model.safetensors").write_bytes(b"no header")
    assert choose(target=head, draft=head).algorithm == ("eagle3" if layout == SPECULATORS else "standalone")


def test_a_target_alone_has_no_draft(model: Path) -> None:
    chosen = choose(target=model)
    assert (chosen.target, chosen.draft, chosen.algorithm) == (model, None, "none")
    assert choose(target=model, draft=model).algorithm == "standalone"
    assert choose(target=model, draft=model, algorithm="eagle3").algorithm == "eagle3"
    assert choose(target=model, algorithm="ngram") == ModelChoice(target=model, draft=None, algorithm="ngram")


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("draft", {"algorithm": "none", "draft": "MODEL"}),
        ("draft", {"algorithm": "ngram", "draft": "MODEL"}),
        ("draft", {"algorithm": "standalone", "target": "MODEL"}),
        ("draft", {"target": "MODEL", "draft": "NOTHING"}),
        ("target", {"target": "NOTHING"}),
        ("num_draft_tokens", {"target": "MODEL", "num_draft_tokens": 3}),
        ("algorithm", {"target": "MODEL", "algorithm": "eagle4"}),
    ],
)
def test_a_contradiction_names_the_setting(field: str, given: dict[str, str | int], model: Path) -> None:
    paths = {"MODEL": model, "NOTHING": model / "nothing"}
    with pytest.raises(ConfigError, match=f"^{field}: "):
        choose(**{key: paths.get(value, value) for key, value in given.items()})
