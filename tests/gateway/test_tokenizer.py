"""Tokenizers read without transformers give its tokens and texts; other files are left to it, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slipstream.bundled import target_dir
from slipstream.common.errors import CheckpointError
from slipstream.gateway.model import load_model
from slipstream.gateway.tokenizer import _QWEN2_PATTERN, Tokenizer, load_tokenizer, longest_token
from tests.harness.checkpoints import FAMILIES, write_json, write_tokenizer
from tests.harness.mutations import is_refused
from tests.harness.sampling import examples
from tests.harness.scripted_scheduler import DESCRIPTION
from tests.harness.tokenizers_by_kind import KINDS, TEXT, make_tokenizer

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
WORDS = (TEXT, "a b", "Hello", "你", "é", "</s>", "<s>a", " <plain> ", "café", "don't", "\n \n", "1234")
MAX_ID = 370
"""Some ids are no tokens."""


def write(path: Path, backend: Backend, config: dict[str, Any], *, family: str = "llama") -> Path:
    backend.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", config)
    write_json(path / "config.json", FAMILIES[family])
    return path


def backend_of(kind: str) -> Backend:
    return Backend.from_str(make_tokenizer(kind).backend_tokenizer.to_str())


def check_equal(path: Path) -> None:
    """Compares our own tokenizer with that of transformers in all that the gateway asks of it."""
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    assert isinstance(ours, Tokenizer)
    words = st.sampled_from(WORDS)

    @settings(max_examples=examples(60), deadline=None)
    @given(st.one_of(words, st.lists(words).map("".join), st.text(max_size=30)))
    def check_texts(text: str) -> None:
        for add_special_tokens in (True, False):
            expected = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens=add_special_tokens) == expected

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(st.integers(0, MAX_ID), max_size=20))
    def check_tokens(ids: list[int]) -> None:
        for skip_special_tokens in (True, False):
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, **options) == theirs.decode(ids, **options)

    check_texts()
    check_tokens()
    assert special_tokens(ours.backend_tokenizer) == special_tokens(theirs.backend_tokenizer)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


def special_tokens(backend: Backend) -> dict[int, str]:
    return {number: token.content for number, token in added(backend).items() if token.special}


def added(backend: Backend) -> dict[int, AddedToken]:
    tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_what_transformers_makes_of_it(tmp_path: Path, kind: str) -> None:
    check_equal(write(tmp_path, backend_of(kind), CONFIG))


_TOKEN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize("has_list", [False, True])
@pytest.mark.parametrize("older", [None, "<s>", {"content": "<s>", **_TOKEN}, ...])
@pytest.mark.parametrize("newer", [None, "</s>", {"__type": "AddedToken", "content": "</s>", **_TOKEN}, ...])
def test_the_end_of_a_text_is_what_transformers_finds(tmp_path: Path, newer: Any, older: Any, has_list: bool) -> None:
    backend = backend_of("byte level")
    decoder = {str(number): token.__getstate__() for number, token in added(backend).items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **({"added_tokens_decoder": decoder} if has_list else {})}
    write_json(tmp_path / "special_tokens_map.json", {} if older is ... else {"eos_token": older})
    path = write(tmp_path, backend, config | ({} if newer is ... else {"eos_token": newer}))
    ours = load_tokenizer(path)
    assert isinstance(ours, Tokenizer)
    theirs = AutoTokenizer.from_pretrained(path)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_the_bundled_tokenizer_is_what_transformers_makes_of_it() -> None:
    check_equal(target_dir())


def test_a_checkpoint_of_the_tests_needs_no_transformers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", FAMILIES["llama"])
    check_equal(tmp_path)


def with_bos(backend: Backend) -> None:
    number = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])


def with_limits(backend: Backend) -> None:
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_token="</s>")


@pytest.mark.parametrize("change", [with_bos, with_limits])
def test_post_processors_stay_and_limits_go(tmp_path: Path, change: Callable[[Backend], None]) -> None:
    backend = backend_of("byte level")
    change(backend)
    path = write(tmp_path, backend, CONFIG | {"add_bos_token": False, "clean_up_tokenization_spaces": True})
    check_equal(path)
    assert len(load_tokenizer(path).encode(TEXT)) > 8
    assert (load_tokenizer(path).encode("a")[0] == backend.token_to_id("<s>")) is (change is with_bos)


def qwen2(*, pattern: str = _QWEN2_PATTERN, trim_offsets: bool = False) -> Backend:
    backend = backend_of("byte level")
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return backend


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_tokenizers_of_qwen_need_no_transformers(tmp_path: Path, family: str, trim_offsets: bool) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|endoftext|>"}
    check_equal(write(tmp_path, qwen2(trim_offsets=trim_offsets), config, family=family))
    for eos_token in ({}, {"eos_token": None}, {"eos_token": "</s>"}):
        path = write(tmp_path, qwen2(), {"tokenizer_class": "Qwen2Tokenizer"} | eos_token, family=family)
        assert load_tokenizer(path).eos_token_id == AutoTokenizer.from_pretrained(path).eos_token_id, eos_token


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (CONFIG | {"tokenizer_class": "LlamaTokenizer"}, "llama"),
        (CONFIG | {"pad_token": "<pad>"}, "llama"),
        (CONFIG | {"pad_token": "<plain>"}, "llama"),
        (CONFIG | {"extra_special_tokens": ["<plain>"]}, "llama"),
        (CONFIG | {"added_tokens_decoder": {"400": {"content": "<more>"}}}, "llama"),
        (CONFIG | {"split_special_tokens": True}, "llama"),
        (CONFIG, "qwen2"),
        ({"bos_token": "<s>"}, "llama"),
    ],
)
def test_transformers_loads_what_it_would_change(tmp_path: Path, config: dict[str, Any], family: str) -> None:
    tokenizer = load_tokenizer(write(tmp_path, backend_of("byte level"), config, family=family))
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert tokenizer.encode(TEXT) == AutoTokenizer.from_pretrained(tmp_path).encode(TEXT)


def test_another_pattern_than_that_of_qwen_is_left_to_transformers(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    path = write(tmp_path, qwen2(pattern=r"\p{L}+|\P{L}"), config, family="qwen3")
    assert isinstance(load_tokenizer(path), PreTrainedTokenizerBase)


def test_special_tokens_that_are_all_there_need_no_transformers(tmp_path: Path) -> None:
    backend = backend_of("byte level")
    decoder = {str(number): token.__getstate__() for number, token in added(backend).items()}
    config = CONFIG | {"added_tokens_decoder": decoder, "extra_special_tokens": ["</s>"], "image_token": "<s>"}
    check_equal(write(tmp_path, backend, config))


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/default.jinja"])
def test_a_template_may_be_a_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, backend_of("byte level"), CONFIG)
    assert load_tokenizer(path).chat_template is None
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text(CHAT_TEMPLATE, encoding="utf-8")
    assert load_tokenizer(path).chat_template == CHAT_TEMPLATE
    (path / "chat_template.jinja").write_text("another", encoding="utf-8")
    assert load_tokenizer(path).chat_template == AutoTokenizer.from_pretrained(path).chat_template


def test_templates_of_the_configuration_may_have_names(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    path = write(tmp_path, backend_of("byte level"), CONFIG | {"chat_template": named})
    assert load_tokenizer(path).chat_template == AutoTokenizer.from_pretrained(path).chat_template


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named_by_its_directory(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, backend_of("byte level"), CONFIG)
    (path / name).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{path}: the tokenizer cannot be loaded: "):
        load_tokenizer(path)


def test_plain_text_does_not_import_transformers() -> None:
    code = (
        "import sys; from slipstream.gateway.tokenizer import load_tokenizer;"
        f"tokenizer = load_tokenizer({str(target_dir())!r}); tokenizer.decode(tokenizer.encode('a'));"
        "print(tokenizer.chat_template, {'transformers', 'torch'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "None set()\n"


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_no_text_has_more_characters_than_its_tokens_may(normalizer: Any) -> None:
    backend = backend_of("byte level")
    backend.normalizer = normalizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    longest = longest_token(tokenizer)
    assert longest is not None
    texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=60), st.text("aeu\u0301\u0308 \n", max_size=60))

    @settings(max_examples=examples(200), deadline=None)
    @given(texts)
    def check(text: str) -> None:
        assert len(text) <= longest * len(tokenizer.encode(text))

    check()


def test_a_bound_is_not_known_where_text_can_be_left_out() -> None:
    for change in (
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.NFKC()},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ):
        backend = backend_of("byte level")
        for name, value in change.items():
            setattr(backend, name, value)
        assert longest_token(PreTrainedTokenizerFast(tokenizer_object=backend)) is None
    backend = backend_of("byte level")
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_token(PreTrainedTokenizerFast(tokenizer_object=backend)) is None
    assert longest_token(object()) is None


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")


def test_changed_files_are_loaded_or_refused(tmp_path: Path) -> None:
    """Only `CheckpointError` comes out, whatever a file holds; a failure names the seed of its change."""
    write_tokenizer(tmp_path)
    description = replace(DESCRIPTION, tokenizer_path=str(tmp_path))
    for name in FILES:
        if not (tmp_path / name).is_file():
            write_json(tmp_path / name, {"model_type": "llama", "eos_token": "<|end|>", "tokenizer_class": None})

    def read() -> None:
        model = load_model(description, None, max_samples=1)
        model.vocabulary.new_detokenizer().push_all(model.tokenizer.encode("The cat"))

    num_refused = 0
    for name in FILES:
        for seed in range(examples(40)):
            num_refused += is_refused(tmp_path / name, read, seed)
    read()
    assert num_refused > examples(40)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "vocab.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"cannot read vocab\.json: Input/output error"):
        load_model(replace(DESCRIPTION, tokenizer_path=str(tmp_path)), None, max_samples=1)


def test_panic_of_the_library_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["model"]["continuing_subword_prefix"] = "longer than any token"
    write_json(tmp_path / "tokenizer.json", document)
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)
