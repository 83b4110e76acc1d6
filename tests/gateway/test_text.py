"""Text sent in parts is the text of the whole, for every kind of decoder; a completion continues its prompt's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.client import AsyncClient
from slipstream.common.wire.job import JobState, OutputChunk
from slipstream.gateway.text import (
    MAX_ROW_TOKENS,
    REPLACEMENT,
    ByteLevelDetokenizer,
    PieceDetokenizer,
    Vocabulary,
    WindowDetokenizer,
)
from tests.harness.generation_server import (
    GenerationServer,
    collect,
    generation_server,
    killed,
    model_of,
    state_of,
    text_of,
    tokens_of,
)
from tests.harness.sampling import examples
from tests.harness.scripted_scheduler import DESCRIPTION
from tests.harness.tokenizers_by_kind import EXACT_KINDS, KINDS, PANICS, TEXT, make_tokenizer, text_after
from tests.harness.waiting import until

MAX_ID = 370
"""Some ids are no tokens, as with a model whose vocabulary is padded."""


def test_a_panic_of_the_tokenizer_is_an_error() -> None:
    tokenizer = make_tokenizer(PANICS)
    vocabulary = Vocabulary(tokenizer)
    space = tokenizer.convert_tokens_to_ids("▁")
    with pytest.raises(ValueError, match="the tokenizer cannot decode"):
        vocabulary.new_detokenizer().push_all([space])
    with pytest.raises(ValueError, match="the tokenizer cannot decode"):
        vocabulary.join(["▁"])


def parts(vocabulary: Vocabulary, ids: Sequence[int]) -> list[str]:
    """Returns the text sent after each token, and at the end."""
    detokenizer = vocabulary.new_detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decodes all tokens at once with the tokenizer itself."""
    return text_after(tokenizer, (), ids)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_random_tokens_are_sent_as_the_whole_would_be(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)

    @settings(max_examples=examples(100), deadline=None)
    @given(st.lists(st.integers(0, MAX_ID), max_size=20))
    def check(ids: list[int]) -> None:
        assert "".join(parts(vocabulary, ids)) == whole(tokenizer, ids)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_come_together_become_the_text_of_those_that_come_alone(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)
    # Whole characters, as most tokens are, and halves among them.
    words = st.sampled_from([TEXT, "a b", "Hello", "你", "é"]).map(tokenizer.encode)
    groups = st.lists(st.one_of(words, st.lists(st.integers(0, MAX_ID), max_size=6)), max_size=6)

    @settings(max_examples=examples(100), deadline=None)
    @given(groups)
    def check(groups: list[list[int]]) -> None:
        detokenizer = vocabulary.new_detokenizer()
        texts: list[str] = []
        for group in groups:
            text, lengths = detokenizer.push_all(group)
            assert len(lengths) == len(group)
            assert sum(lengths) == len(text)
            ends = list(accumulate(lengths))
            texts += [text[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        assert [*texts, detokenizer.finish()] == parts(vocabulary, [token for group in groups for token in group])

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_sent_as_they_are_decoded(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)
    texts = [TEXT, " leading", "  two", "trailing ", "👩‍👩‍👧" * 5, "e\u0301" * 5, "你好" * 20, "\ufffd!", " ", "\n"]

    @settings(max_examples=examples(100), deadline=None)
    @given(st.one_of(st.sampled_from(texts), st.text(max_size=30)))
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert "".join(parts(vocabulary, ids)) == whole(tokenizer, ids)

    check()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("byte level", ByteLevelDetokenizer),
        ("llama", PieceDetokenizer),
        ("metaspace", PieceDetokenizer),
        ("none", PieceDetokenizer),
        ("suffix", WindowDetokenizer),
        ("strip", WindowDetokenizer),
    ],
)
def test_the_way_follows_the_decoder(kind: str, expected: type) -> None:
    assert type(Vocabulary(make_tokenizer(kind)).new_detokenizer()) is expected


@pytest.mark.parametrize("kind", ["byte level", "llama"])
@pytest.mark.parametrize("text", ["é", "你", "👍"])
def test_half_a_character_is_never_sent(kind: str, text: str) -> None:
    tokenizer = make_tokenizer(kind)
    # Bytes as tokens: by their printable stand-ins, or as <0x..>.
    alphabet = {vocabulary_byte(tokenizer, kind, byte): byte for byte in text.encode()}
    ids = [token for byte in text.encode() for token, value in alphabet.items() if value == byte]
    plain = tokenizer.convert_tokens_to_ids("<plain>")
    sent = parts(Vocabulary(tokenizer), [plain, *ids, plain])
    assert "\ufffd" not in "".join(sent)
    assert "".join(sent) == f"<plain>{text}<plain>"
    # Not before its last byte has come.
    assert sent[1 : len(ids)] == [""] * (len(ids) - 1)


def vocabulary_byte(tokenizer: Any, kind: str, byte: int) -> int:
    """The token that is this one byte."""
    if kind != "byte level":
        return int(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>"))
    vocabulary = Vocabulary(tokenizer)
    return next(token for token in range(len(tokenizer)) if vocabulary.bytes_of(token) == bytes([byte]))


@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_bytes_that_are_no_character_are_replaced_at_the_end(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    sent = parts(Vocabulary(tokenizer), [vocabulary_byte(tokenizer, kind, 0xE4)])
    assert sent == ["", "\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_no_text(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id] * 3
    assert "".join(parts(Vocabulary(tokenizer), ids)) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_certain_as_soon_as_it_can_be(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    *sent, rest = parts(Vocabulary(tokenizer), ids)
    assert ("".join(sent), rest) == (whole(tokenizer, ids), "")
    assert all(sent[1:]), "the first may be the space that the decoder leaves out"


@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_a_character_that_breaks_off_is_replaced_before_the_tokens_after_it(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    ids, vocabulary = tokenizer.encode("Hello", add_special_tokens=False), Vocabulary(tokenizer)
    detokenizer = vocabulary.new_detokenizer()
    broken = detokenizer.push_all([*ids, vocabulary_byte(tokenizer, kind, 0xE4)])[0]
    assert (broken, detokenizer.push_all(ids)[0][0]) == (whole(tokenizer, ids), REPLACEMENT)


@pytest.mark.parametrize(("kind", "expected"), [("llama", " Hello Hello"), ("gemma", " Hello Hello")])
def test_a_completion_keeps_its_first_space_and_an_answer_does_as_the_decoder_says(kind: str, expected: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)
    hello = tokenizer.convert_tokens_to_ids("▁Hello")
    bos = tokenizer.bos_token_id
    assert continued(vocabulary, [bos, hello, bos], [hello, hello]) == expected
    # Without a word before it, and as the answer in a conversation, the text is the tokenizer's own.
    for prompt in ([bos], []):
        assert continued(vocabulary, prompt, [hello, hello]) == whole(tokenizer, [hello, hello])


def continued(vocabulary: Vocabulary, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of an output that continues a prompt's, token by token."""
    detokenizer = vocabulary.new_detokenizer(prompt)
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.finish()])


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_random_tokens_continue_random_prompts_as_the_whole_would(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)
    character = [vocabulary_byte(tokenizer, kind, byte) for byte in "你".encode()]
    # Bytes at the end of a prompt are many more than those of a character, and none of them is certain.
    token = st.one_of(st.integers(0, MAX_ID), st.sampled_from(character))
    row = st.tuples(st.integers(0, 40), st.integers(0, 2)).map(lambda size: (character * 41)[: 3 * size[0] + size[1]])
    prompts = st.tuples(st.lists(token, max_size=60), row).map(lambda parts: parts[0] + parts[1])

    @settings(max_examples=examples(200), deadline=None)
    @given(prompts, st.lists(token, max_size=12), st.integers(0, 12))
    def check(prompt: list[int], ids: list[int], cut: int) -> None:
        expected = text_after(tokenizer, prompt, ids)
        assert continued(vocabulary, prompt, ids) == expected
        detokenizer = vocabulary.new_detokenizer(prompt)
        steps = [detokenizer.push_all(step) for step in (ids[:cut], ids[cut:]) if step]
        assert "".join(text for text, _ in steps) + detokenizer.finish() == expected
        assert [sum(lengths) for _, lengths in steps] == [len(text) for text, _ in steps]

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_continues_its_prompt(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)
    texts = st.one_of(st.sampled_from([TEXT, "Hello", "你好" * 80, " world", "a b", " "]), st.text(max_size=30))

    @settings(max_examples=examples(100), deadline=None)
    @given(texts, texts)
    def check(prompt_text: str, text: str) -> None:
        prompt, ids = tokenizer.encode(prompt_text), tokenizer.encode(text)
        assert continued(vocabulary, prompt, ids) == text_after(tokenizer, prompt, ids)

    check()


@pytest.mark.parametrize("kind", ["byte level", "llama"])
def test_a_long_row_of_bytes_before_an_output_is_bounded(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    vocabulary = Vocabulary(tokenizer)
    character = [vocabulary_byte(tokenizer, kind, byte) for byte in "你".encode()]
    prompt = character * MAX_ROW_TOKENS
    assert len(vocabulary.end_of(prompt)) <= MAX_ROW_TOKENS + 2
    assert continued(vocabulary, prompt, character) == "你"
    # Special tokens before the output are looked past, however many they are.
    hello = tokenizer.encode("Hello")
    prompt = [*hello, *[tokenizer.bos_token_id] * 100]
    assert vocabulary.end_of(prompt) == hello
    assert continued(vocabulary, prompt, hello) == text_after(tokenizer, prompt, hello)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_token_does_not_grow(kind: str) -> None:
    """Also where no character is ever complete."""
    tokenizer = make_tokenizer(kind)
    broken = vocabulary_byte(tokenizer, "byte level" if kind == "byte level" else "piece", 0xFF)
    for ids in ([broken] * 20_000, list(range(3, 340)) * 60):
        detokenizer = Vocabulary(tokenizer).new_detokenizer()
        started = time.process_time()
        for token in ids:
            detokenizer.push(token)
        detokenizer.finish()
        # Decoding all of them with each new one would take minutes.
        assert time.process_time() - started < 20


class _Decoder:
    """Counts the tokens of each window that is decoded."""

    def __init__(self, character: str) -> None:
        self.character = character
        self.longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        """The same for every token."""
        self.longest = max(self.longest, len(ids))
        return self.character * len(ids)


@pytest.mark.parametrize("character", ["\ufffd", " "])
def test_a_window_has_an_end(character: str) -> None:
    decoder = _Decoder(character)
    detokenizer = WindowDetokenizer(decoder.decode)

    def pushed() -> Iterator[str]:
        for token in range(1000):
            yield detokenizer.push(token)
        yield detokenizer.finish()

    assert "".join(pushed()) == character * 1000
    assert decoder.longest == 2 * 32


@pytest.mark.parametrize("num_before", [0, 1, 5])
@pytest.mark.parametrize(("num_tokens", "sent"), [(32, "é"), (33, REPLACEMENT)])
def test_a_character_has_at_most_32_tokens(num_before: int, num_tokens: int, sent: str) -> None:
    def decode(ids: Sequence[int]) -> str:
        num_whole, num_more = divmod(ids.count(1), num_tokens)
        return "a" * ids.count(0) + "é" * num_whole + REPLACEMENT * (num_more > 0)

    detokenizer = WindowDetokenizer(decode)
    expected = ["a"] * num_before + [""] * 31 + [sent]
    assert [detokenizer.push(token) for token in [0] * num_before + [1] * 32] == expected


KINDS = ("llama", "byte level", "wordpiece", "suffix")
TEMPLATE = "{{ messages[0].content }}"
CHAT = [{"role": "user", "content": "Hello world"}]
PAUSE = 3
NUM_TOKENS = 20


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of tokenizer, which has a chat template."""
    tokenizer = model_of(DESCRIPTION, request.param).tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return str(request.param)


def requests_to(server: GenerationServer) -> dict[str, dict[str, Any]]:
    """By job id; the fake loop's output repeats the prompt."""
    tokenizer = server.model.tokenizer
    ids = [*tokenizer.encode(" world"), *tokenizer.encode("你", add_special_tokens=False)]
    whole = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3}
    return {
        "text": {"prompt": "Hello world", **whole},
        "ids": {"prompt": ids, **whole},
        "samples": {"prompt": " Hello", "n": 2, **whole},
        "chat": {"prompt": CHAT, **whole},
        "stop": {"prompt": "Hello world", "stop": [expected_text(server, "Hello world", 6)[:2]], **whole},
    }


def prompt_ids(server: GenerationServer, prompt: Any) -> list[int]:
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return prompt
    is_chat = not isinstance(prompt, str)
    ids: list[int] = server.model.tokenizer.encode("Hello world" if is_chat else prompt, add_special_tokens=not is_chat)
    return ids


def expected_text(server: GenerationServer, prompt: Any, num_tokens: int = NUM_TOKENS) -> str:
    ids = prompt_ids(server, prompt)
    output = (ids * NUM_TOKENS)[:num_tokens]
    return text_after(server.model.tokenizer, () if prompt is CHAT else ids, output)


async def check(server: GenerationServer, client: AsyncClient) -> None:
    """Reads each job from every token on."""
    for job_id, request in requests_to(server).items():
        expected = "" if "stop" in request else expected_text(server, request["prompt"])
        whole = await collect(client.watch_job(job_id))
        for index in range(request.get("n", 1)):
            own = of_sample(whole, index)
            assert text_of(own) == expected, job_id
            lengths = [length for chunk in own for length in chunk.text_lengths]
            for offset in range(len(tokens_of(own)) + 1):
                offsets = [0] * index + [offset]
                rest = of_sample(await collect(client.watch_job(job_id, offsets)), index)
                assert text_of(rest) == expected[sum(lengths[:offset]) :], (job_id, offset)


def of_sample(chunks: list[OutputChunk], index: int) -> list[OutputChunk]:
    return [chunk for chunk in chunks if chunk.sample_index == index]


async def create_all(server: GenerationServer, client: AsyncClient) -> None:
    for job_id, request in requests_to(server).items():
        await client.create_job(job_id=job_id, **request)


async def test_text_continues_the_prompt(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        await create_all(server, client)
        await check(server, client)


async def test_text_is_the_same_after_a_gateway_was_killed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    async with generation_server(kind=kind, journal=path) as server, AsyncClient(server.address) as client:
        server.loop.pause_tokens = PAUSE
        await create_all(server, client)
        await until(lambda: all(job.is_over or job.num_tokens >= PAUSE for job in server.store.jobs()))
        await server.manager.journal.flush()
        left = killed(path)
    async with generation_server(kind=kind, journal=left) as server, AsyncClient(server.address) as client:
        await check(server, client)
        await server.manager.journal.flush()
        again = killed(left)
    async with generation_server(kind=kind, journal=again) as server, AsyncClient(server.address) as client:
        await check(server, client)


async def test_text_is_the_same_where_its_caller_left_and_came_back(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        request = requests_to(server)["text"]
        server.loop.pause_tokens = PAUSE
        chunks = client.generate(job_id="text", **request)
        await anext(chunks)
        await chunks.aclose()
        assert (await state_of(client, "text", JobState.ENDED)).finish_reason == "abort"
        server.loop.pause_tokens = None
        assert text_of(await collect(client.generate(job_id="text", **request))) == expected_text(
            server, request["prompt"]
        )
