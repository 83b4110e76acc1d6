"""The bundled data: it is whole, it is small, and the models are as good as their card says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from slipstream.bundled import prompts, standalone_dir, target_dir
from slipstream.services.models.json_files import tokenizer_fingerprint
from slipstream.training.bits_per_byte import measure
from tests.harness.paged_model import PAGE_SIZE, PagedModel

FOLDER = target_dir().parent
MAX_BYTES = 42_000_000
SHORT_CONTEXT_BITS = 0.4
"""Prompts have 48 to 96 tokens and so little context; over whole files it is 1024."""
MODELS = {"target": target_dir(), "standalone": standalone_dir()}
TEXTS = (
    "",
    " ",
    "def main():\n    return 1\n",
    "\ttabs \t and  spaces   \r\n\n\n",
    "naïve Ünïcode: 漢字, Ελληνικά, עברית, 🙂👩‍👩‍👧‍👦",
    "".join(map(chr, range(256))),
    "\x00\ufeff\u2028\U0010ffff",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(target_dir() / "tokenizer.json"))


def test_size() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


@pytest.mark.parametrize("text", [*TEXTS, *(prompt.text for prompt in prompts()[:8])])
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < tokenizer.get_vocab_size() for token in ids)


def test_draft_has_the_targets_tokenizer() -> None:
    assert tokenizer_fingerprint(target_dir()) == tokenizer_fingerprint(standalone_dir())


def test_prompts(tokenizer: Tokenizer) -> None:
    found = prompts()
    assert len(found) == len({prompt.id for prompt in found}) == len({prompt.text for prompt in found}) == 64
    for prompt in found:
        assert len(tokenizer.encode(prompt.text).ids) == prompt.num_tokens
        assert 48 <= prompt.num_tokens <= 96
        assert prompt.line >= 1
        assert not Path(prompt.source).is_absolute()


@pytest.mark.parametrize("name", MODELS)
def test_bits_per_byte_are_near_the_cards(tokenizer: Tokenizer, name: str) -> None:
    results = json.loads((FOLDER / "results.json").read_text())
    figures = results if name == "target" else results[name]
    on_card = figures["heldout"]["bits_per_byte"]
    assert f"{on_card:.3f}" in (FOLDER / "README.md").read_text(encoding="utf-8")
    model: Any = AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32)
    texts = [prompt.text for prompt in prompts()]
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    files = [[end_of_text, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    result = measure(model, files, sum(len(text.encode()) for text in texts), context=1024, stride=512)
    assert result["bits_per_byte"] < on_card + SHORT_CONTEXT_BITS


@pytest.mark.parametrize("name", MODELS)
def test_decoder_computes_what_transformers_does(tokenizer: Tokenizer, name: str) -> None:
    model = PagedModel(MODELS[name])
    ids = tokenizer.encode(prompts()[0].text).ids
    theirs: Any = AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(model.prefill(ids, chunk=5 * PAGE_SIZE), expected, atol=1e-4, rtol=1e-4)
