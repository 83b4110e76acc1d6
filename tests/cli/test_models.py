"""The models that options name: which are chosen, and why they are refused before anything is started."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream import bundled
from slipstream.cli import models as models_module
from slipstream.cli import up
from slipstream.cli.doctor import Verdict, check_models
from slipstream.cli.models import NONE, ModelChoice, ModelOptions, check_device
from slipstream.cli.up_config import UpConfig
from slipstream.common.errors import CheckpointError, ConfigError
from slipstream.services.models.head_config import DFLASH, EAGLE, EAGLE3, MTP
from slipstream.services.worker.config import STANDALONE
from tests.harness.checkpoints import write_checkpoint, write_json, write_weights
from tests.harness.eagle3_checkpoints import ALGORITHMS, BLOCKS, LAYOUTS, SPECULATORS, write_head
from tests.harness.running import slipstream
from tests.harness.transformers_checkpoints import write_by_transformers

TARGET = bundled.target_dir()
DRAFTS = {
    STANDALONE: bundled.standalone_dir(),
    EAGLE3: bundled.eagle3_dir(),
    EAGLE: bundled.eagle_dir(),
    MTP: bundled.mtp_dir(),
    DFLASH: bundled.dflash_dir(),
}


def refused(models: ModelChoice, *, needs_weights: bool = True) -> str:
    """Why models are refused; the doctor says the same of them."""
    with pytest.raises(CheckpointError) as caught:
        models_module.check_models(models, needs_weights=needs_weights)
    if needs_weights:
        (failed,) = [finding for finding in check_models(models) if finding.verdict is Verdict.FAILED]
        assert str(caught.value) in failed.detail
    return str(caught.value)


@pytest.mark.parametrize("algorithm", DRAFTS)
def test_what_fits_is_accepted_without_pytorch(algorithm: str) -> None:
    code = (
        "import sys; from pathlib import Path; from slipstream.cli.models import check_models;"
        "from slipstream.cli.models import ModelChoice;"
        "check_models(ModelChoice(target=Path(sys.argv[1]), draft=Path(sys.argv[2]), algorithm=sys.argv[3]));"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    arguments = (sys.executable, "-c", code, str(TARGET), str(DRAFTS[algorithm]), algorithm)
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    own = write_checkpoint(tmp_path / "own")
    models = ModelChoice(target=own, draft=own, algorithm=STANDALONE)
    models_module.check_models(models)
    assert "its tokenizer is not that of the target" in refused(replace(models, draft=bundled.standalone_dir()))
    assert "the head is for a target of hidden size" in refused(
        replace(models, draft=bundled.eagle3_dir(), algorithm=EAGLE3)
    )
    mamba = write_checkpoint(tmp_path / "mamba", architectures=["MambaForCausalLM"])
    assert "architectures: got ['MambaForCausalLM']" in refused(replace(models, target=mamba, draft=None))
    assert "architectures: got ['MambaForCausalLM']" in refused(replace(models, draft=mamba))
    (own / "model.safetensors").write_bytes(b"")
    assert "is truncated or no safetensors file" in refused(replace(models, draft=None))
    models_module.check_models(models, needs_weights=False)
    (own / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refused(models, needs_weights=False)


def test_a_setting_that_the_target_does_not_allow_is_refused_before_anything_starts() -> None:
    config = UpConfig(models=ModelChoice(target=TARGET, draft=None, algorithm=NONE), device="cpu", context_tokens=1024)
    asyncio.run(up._check(config))
    for wrong, accepted in (
        ({"tensor_parallel_size": 2}, "a divisor of num_attention_heads = 9"),
        ({"context_tokens": 1025}, "at most 1024, what the model was made for"),
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=f"^{name}: got {value}, accepted: {accepted}"):
            asyncio.run(up._check(replace(config, **wrong)))


def test_a_head_that_reads_layers_which_the_target_lacks_is_refused(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    head = write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    refusal = refused(ModelChoice(target=target, draft=head, algorithm=EAGLE3))
    assert refusal.startswith(f"{head}: the head reads layer 9 of its target, {target} has ")


@pytest.mark.parametrize("option", ["--draft", "--target"])
def test_up_ends_before_it_starts_anything(option: str, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other")
    options = ("--algorithm", "standalone", "--draft", str(bundled.standalone_dir()), option, str(other))
    paths = ("--state-dir", str(tmp_path / "state"), "--listen", "127.0.0.1:0")
    found = slipstream("up", *paths, *options)
    draft, target = (other, TARGET) if option == "--draft" else (bundled.standalone_dir(), other)
    message = f"slipstream: error: {draft}: its tokenizer is not that of the target, {target}\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", message)


def test_tensors_that_do_not_fit_are_found_before_anything_starts(tmp_path: Path) -> None:
    """Of a target with experts, of a draft and of a head: by their headers."""
    target = write_by_transformers(tmp_path / "target", "qwen3-moe")
    plain, head = (
        write_checkpoint(tmp_path / "plain"),
        write_head(tmp_path / "head", drop="midlayer.mlp.up_proj.weight"),
    )
    models_module.check_models(ModelChoice(target=target, draft=plain, algorithm=STANDALONE))
    missing = "missing tensors: midlayer.mlp.up_proj.weight; config.json asks for them"
    assert refused(ModelChoice(target=target, draft=head, algorithm=EAGLE3)) == f"{head}: {missing}"
    name = "model.layers.3.mlp.experts.5.down_proj.weight"
    write_weights(target, load_file(target / "model.safetensors") | {name: torch.zeros(64, 25)})
    wrong = f"tensor {name}: got shape [64, 25], config.json asks for [64, 24]"
    message = f"{target}: model.safetensors: {wrong}"
    assert refused(ModelChoice(target=target, draft=None, algorithm="none")) == message
    assert refused(ModelChoice(target=plain, draft=target, algorithm=STANDALONE)) == message
    paths = ("--state-dir", str(tmp_path / "state"), "--listen", "127.0.0.1:0", "--algorithm", "none")
    found = slipstream("up", *paths, "--target", str(target))
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"slipstream: error: {message}\n")
    (target / "model.safetensors").unlink()
    write_json(target / "model.safetensors.index.json", {"weight_map": {name: "../plain/model.safetensors"}})
    found = slipstream("up", *paths, "--target", str(target))
    outside = f"weight_map: {name}: got '../plain/model.safetensors', supported: the name of a safetensors file"
    assert found.returncode == 2
    assert found.stderr.startswith(f"slipstream: error: {target}: model.safetensors.index.json: {outside}")


def test_a_gpu_without_its_driver_or_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cpu")
    check_device("auto")

    def lacks(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(models_module.ctypes, "CDLL", lacks)
    monkeypatch.setattr(models_module.runpy, "run_path", lambda _: {"cuda": "12.8"})
    with pytest.raises(ConfigError, match=r"device: got 'cuda', accepted: cpu here: there is no libcuda.so.1"):
        check_device("cuda")
    monkeypatch.setattr(models_module.runpy, "run_path", lambda _: {"cuda": None})
    with pytest.raises(ConfigError, match="device: got 'cuda', accepted: cpu here: this PyTorch was built without"):
        check_device("cuda")


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
    for name in ("target", "standalone", "eagle3", "eagle", "mtp", "dflash"):
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
    for algorithm in ("eagle3", "eagle", "mtp", "dflash"):
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
        ('{"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}', "dflash"),
        ('{"architectures": ["Qwen3ForCausalLM"], "dflash_config": {}}', "dflash"),
        ('{"architectures": ["LlamaForCausalLM"]}', "standalone"),
        ("[]", "standalone"),
        ("\ufeff{", "standalone"),
        ("[" * 100_000, "standalone"),
    ],
)
def test_a_draft_may_say_what_it_is(model: Path, config: str, algorithm: str) -> None:
    (model / "config.json").write_text(config, encoding="utf-8")
    assert choose(target=model, draft=model).algorithm == algorithm
    assert choose(target=model, draft=model, algorithm="mtp").algorithm == "mtp"


@pytest.mark.parametrize("layout", [*LAYOUTS, BLOCKS])
def test_a_heads_tensors_say_what_it_is(tmp_path: Path, layout: str) -> None:
    head = write_head(tmp_path, layout=layout, architectures=["LlamaForCausalLM"])
    assert choose(target=head, draft=head).algorithm == ALGORITHMS[layout]
    (head / "model.safetensors").write_bytes(b"no header")
    by_config = {SPECULATORS: "eagle3", BLOCKS: "dflash"}.get(layout, "standalone")
    assert choose(target=head, draft=head).algorithm == by_config


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
