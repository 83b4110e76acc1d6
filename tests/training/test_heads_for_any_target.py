"""EAGLE-3 heads for targets of any family and vocabulary: they are served, and a run goes on where it was ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import ConfigError
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.checkpoint import LoadFormat, load_decoder, load_head
from slipstream.services.models.heads import Eagle3Head
from slipstream.services.worker.config import WorkerConfig
from slipstream.training import distil, distil_dflash, distil_eagle, distil_mtp, distillation, run
from slipstream.training.distil_eagle3 import main, shape_for
from slipstream.training.eagle3 import Eagle3Head as TrainedHead
from slipstream.training.options import run as run_command
from slipstream.training.teacher import Teacher, default_layers
from tests.harness.checkpoints import write_checkpoint, write_weights
from tests.harness.paged_model import CPU, PagedModel
from tests.harness.transformers_checkpoints import write_by_transformers

VOCAB_SIZE = 70_000
FIRST = 65_000
"""Some tokens of the text have ids that 16 bits do not hold."""
IDS = list(range(FIRST, VOCAB_SIZE, 90))[:50]
SIZES: dict[str, Any] = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
SETTINGS: dict[str, Any] = {"batch": 2, "length": 16, "depth": 2, "draft_vocab": 64, "device": "cpu", "rate": 4e-3}
STEPS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with a large vocabulary, of which it writes only the text's tokens."""
    sizes = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": True, "num_hidden_layers": 3, "intermediate_size": 48}
    path = write_checkpoint(tmp_path_factory.mktemp("target"), **SIZES | sizes)
    weights = load_file(path / "model.safetensors")
    rows = weights["model.embed_tokens.weight"][IDS].clone()
    weights["model.embed_tokens.weight"].zero_()[IDS] = rows
    weights["model.norm.weight"].fill_(10.0)
    write_weights(path, weights)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that can be learned: fifty tokens in turns."""
    path = tmp_path_factory.mktemp("data") / "text.npy"
    np.save(path, np.array(IDS * 24, dtype=np.uint32))
    return path


def test_a_head_of_a_large_vocabulary_learns_and_is_served(target: Path, data: Path, tmp_path: Path) -> None:
    main(target, [data], tmp_path, steps=40, **SETTINGS)
    log = json.loads((tmp_path / "training.json").read_text())["log"]
    assert log[0]["text_loss"] > log[-1]["text_loss"] + 0.1
    assert not (tmp_path / "run.pt").exists()
    head = load_head("eagle3", tmp_path, target=target, device=CPU, dtype=torch.float32)
    assert isinstance(head, Eagle3Head)
    assert set(IDS) <= set(head.token_ids.tolist())
    verify = make_verify(WorkerConfig(model=target), HostDevice(), 0).description
    draft = make_draft(WorkerConfig(model=tmp_path, algorithm="eagle3", target=target), HostDevice(), 0).description
    draft.check_fits(verify)


def test_a_run_that_is_ended_goes_on_to_the_same_weights(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(target, [data], whole, steps=STEPS, **SETTINGS)
    calls = iter(range(STEPS // 2))

    def interrupted(saved: run.SavedRun, *_: object) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.SavedRun, "save_now_and_then", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(target, [data], parts, steps=STEPS, **SETTINGS)
    assert not (parts / "model.safetensors").exists()
    np.save(tmp_path / "other.npy", np.load(data) + 1)
    with pytest.raises(ConfigError, match=r"^data: "):  # whose most frequent tokens are not the head's
        main(target, [tmp_path / "other.npy"], parts, steps=STEPS, resume=True, **SETTINGS)
    with pytest.raises(ConfigError, match=r"^target: "):
        main(target, [data], parts, steps=STEPS, resume=True, load_format=LoadFormat.DUMMY, **SETTINGS)
    main(target, [data], parts, steps=STEPS, resume=True, **SETTINGS)
    expected = load_file(whole / "model.safetensors")
    for name, weight in load_file(parts / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name
    steps = [record["step"] for record in json.loads((parts / "training.json").read_text())["log"]]
    assert steps == [distillation.LOG_EVERY_STEPS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe", "olmo3"])
def test_the_teacher_says_what_the_target_says(family: str, tmp_path: Path) -> None:
    path = write_by_transformers(tmp_path / "it", family, seed=2)
    teacher, model = Teacher(path, CPU, fused_layers=(1,)), PagedModel(path)
    tokens = torch.arange(3, 23).view(2, 10)
    states, hidden = teacher.states(tokens)
    assert states.shape == hidden.shape == (2, 10, teacher.config.hidden_size)
    ids = torch.tensor([5, 1, 9])
    found = teacher.log_probabilities(hidden, 0.5, ids)
    for row in range(2):
        logits = model.run(model.batch([(0, tokens[row].tolist())]))[0]
        torch.testing.assert_close(found[row], (logits / 0.5).log_softmax(-1)[:, ids], atol=2e-4, rtol=1e-4)
    shape = shape_for(teacher, 1 << 20, None)
    assert shape.draft_vocab_size == teacher.config.vocab_size
    ids = torch.arange(shape.draft_vocab_size)
    head = TrainedHead(shape, ids, teacher.decoder.norm.weight, teacher.output_rows(ids), num_positions=4)
    assert torch.equal(head.lm_head.weight, load_decoder(path, device=CPU, dtype=torch.float32).head.plain_weight)


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(2, (0, 1, 2)), (6, (2, 4, 6)), (8, (2, 4, 5)), (32, (2, 16, 29))]
)
def test_layers_that_are_fused(num_layers: int, expected: tuple[int, ...]) -> None:
    assert default_layers(num_layers) == expected


def refused(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[..., None] = main,
) -> str:
    """Runs a command, which ends with status 2, and returns its only line."""
    monkeypatch.setattr(sys, "argv", ["command", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(command)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "1,2", "accepted: .npy with token ids, .txt, or .jsonl whose lines have text or messages"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', "a.jsonl: line 2"),
        ("a.npy", np.array([1, VOCAB_SIZE]), f"a.npy: int64 from 1 to {VOCAB_SIZE}"),
        ("b.npy", np.array([1.0]), "b.npy: float64 from 1.0 to 1.0"),
        ("c.npy", np.arange(40), "40 tokens"),
        ("d.npy", "no array", "d.npy: "),
        ("a.txt", b"\xff\xfe\xfd", "a.txt: 'utf-8' codec"),
    ],
)
def test_texts_that_are_none(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: Any,
    expected: str,
) -> None:
    if isinstance(content, str):
        (tmp_path / name).write_text(content, encoding="utf-8")
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content)
    arguments = ["--target", str(target), "--data", str(tmp_path / name), "--out", str(tmp_path / "out")]
    line = refused(arguments, monkeypatch, capsys)
    assert "data" in line
    assert expected in line


def test_runs_that_cannot_go_on(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(target), "--data", str(data), "--out", str(tmp_path), "--resume", "--length", "16"]
    assert "resume" in refused(arguments, monkeypatch, capsys)
    (tmp_path / "run.pt").touch()
    assert "out" in refused(arguments[:-3], monkeypatch, capsys)
    for content in (b"", b"PK\3\4 cut short"):
        (tmp_path / "run.pt").write_bytes(content)
        line = refused(arguments, monkeypatch, capsys)
        assert f"resume: got '{tmp_path / 'run.pt'}', accepted: the state of a run, and it cannot be read" in line


@pytest.mark.parametrize("command", [module.main for module in (distil, distil_dflash, distil_eagle, distil_mtp)])
def test_a_wrong_option_of_a_sister_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Callable[..., None]
) -> None:
    (tmp_path / "train.npy").write_bytes(b"no array")
    given = [word for name in ("--samples", "--target", "--out", "--log") for word in (name, str(tmp_path))]
    for options, expected in (
        (["--corpus", str(tmp_path / "gone")], "No such file or directory: '"),
        (["--corpus", str(tmp_path)], f"corpus: got '{tmp_path / 'train.npy'}: "),
        (["--corpus", str(tmp_path), "--device", "gpu"], "device: got 'gpu', accepted: a device that this PyTorch has"),
    ):
        assert expected in refused([*given, *options], monkeypatch, capsys, command)


@pytest.mark.parametrize("command", [module.main for module in (distil, distil_dflash, distil_eagle, distil_mtp)])
def test_texts_that_are_too_short_for_a_batch_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Callable[..., None]
) -> None:
    given = [word for name in ("--target", "--out", "--log", "--corpus") for word in (name, str(tmp_path))]
    given += ["--batch", "1", "--samples", str(tmp_path / "samples.npy")]
    for num_tokens, samples, expected in (
        (40, [[1, 2]], "corpus: got '40 tokens', accepted: at least 3072, for one batch"),
        (4000, [1, 2], "accepted: rows of one length, as the sample command writes them"),
        (4000, [[1, 2]], "samples: got '1 rows', accepted: at least "),
    ):
        np.save(tmp_path / "train.npy", np.arange(num_tokens, dtype=np.uint16))
        np.save(tmp_path / "samples.npy", np.array(samples, dtype=np.uint16))
        assert expected in refused(given, monkeypatch, capsys, command)


def test_a_wrong_load_format_names_those_that_there_are(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(target), "--data", str(data), "--out", str(tmp_path), "--load-format", "gguf"]
    monkeypatch.setattr(sys, "argv", ["distil_eagle3", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'gguf' is not one of 'auto', 'dummy'" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("option", ["batch", "length", "steps", "minutes", "depth"])
def test_a_size_of_nothing_is_refused_by_name(
    option: str, target: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(target), "--data", str(data), "--out", str(data.parent / "out"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["distil_eagle3", *arguments, f"--{option}", "0"])
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    assert f"Invalid value for '--{option}'" in capsys.readouterr().err


def test_sequences_are_no_longer_than_the_targets_context(target: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.arange(2200))
    with pytest.raises(ConfigError, match=r"^length: got 513, accepted: at most 512"):
        main(target, [tmp_path / "text.npy"], tmp_path, **SETTINGS | {"length": 513})
