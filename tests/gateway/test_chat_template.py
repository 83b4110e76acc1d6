"""Conversations: our own renderer gives transformers' texts within bounds; tokens, texts and forms on the wire."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.client import AsyncClient
from slipstream.common.errors import InvalidArgumentError
from slipstream.gateway import chat_template, service
from slipstream.gateway.chat_template import TemplateError, formats_of, render
from slipstream.gateway.request import MAX_MESSAGES
from tests.harness.chat_templates import CALLING, IN_PARTS, PLAIN, TEMPLATES, TOOL
from tests.harness.generation_server import GenerationServer, collect, generation_server, text_of, tokens_of
from tests.harness.scripted_scheduler import EOS_ID
from tests.harness.tokenizers_by_kind import make_tokenizer


def tokenizer_with(template: Any, **tokens: str | None) -> Any:
    """A tokenizer of transformers with a template."""
    backend = make_tokenizer("byte level").backend_tokenizer
    named = {"bos_token": "<s>", "eos_token": "</s>"} | tokens
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named)


def give(server: GenerationServer, tokenizer: Any) -> None:
    """Gives the server's model another tokenizer."""
    server.model.tokenizer = tokenizer


CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    *((name, PLAIN, {}) for name in TEMPLATES),
    *((name, PLAIN, {"tools": [TOOL]}) for name in ("hermes", "llama3", "mistral", "named")),
    *((name, CALLING, {"tools": [TOOL]}) for name in ("hermes", "llama3", "mistral", "named")),
    ("hermes", PLAIN, {"template_kwargs": {"enable_thinking": False}}),
    ("parts", IN_PARTS, {}),
    *((name, PLAIN[:3], {"continue_final_message": True}) for name in ("hermes", "llama3", "mistral", "parts")),
    ("hermes", PLAIN, {"add_generation_prompt": False}),
]


@pytest.mark.parametrize(("name", "messages", "options"), CASES)
@pytest.mark.parametrize("tokens", [{}, {"bos_token": None}], ids=["bos", "no bos"])
async def test_a_conversation_has_the_tokens_of_transformers(
    name: str, messages: list[dict[str, Any]], options: dict[str, Any], tokens: dict[str, Any]
) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name], **tokens)
    kwargs = {"add_generation_prompt": not options.get("continue_final_message")} | options
    kwargs |= kwargs.pop("template_kwargs", {})
    expected = tokenizer.apply_chat_template(copy.deepcopy(messages), **kwargs, return_dict=False)
    async with generation_server() as server, AsyncClient(server.address) as client:
        give(server, tokenizer)
        found = await client.tokenize(messages, **options)
        assert [token for token, _ in found] == expected
        chunks = await collect(client.generate(messages, max_new_tokens=len(expected), ignore_eos=True, **options))
        assert tokens_of(chunks) == expected  # the fake loop repeats the prompt


@pytest.mark.parametrize(
    ("template", "options", "field"),
    [
        ("{{ messages[0].content }}", {"tools": [TOOL]}, "messages.tools"),
        (
            "{{ messages[0].content }}",
            {"template_kwargs": {"enable_thinking": True}},
            "template_kwargs.enable_thinking",
        ),
        ("{{ messages[0].content }}", {"template_kwargs": {"messages": []}}, "messages.template_kwargs.messages"),
        (
            "{{ messages[0].content }}",
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation",
        ),
        ({"tool_use": "{{ tools }}"}, {}, "messages"),
    ],
)
async def test_what_a_template_does_not_take_is_refused_by_name(
    template: Any, options: dict[str, Any], field: str
) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        give(server, tokenizer_with(template))
        with pytest.raises(InvalidArgumentError) as caught:
            await collect(client.generate(PLAIN, **options))
        assert field in caught.value.field


async def test_parts_are_one_text_for_a_template_that_takes_no_parts() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        give(server, tokenizer_with("{{ messages[0].content }}"))
        assert b"".join(token for _, token in await client.tokenize(IN_PARTS)) == b"Hello\nworld"


async def test_a_developer_is_the_system_where_the_template_does_not_name_one() -> None:
    messages = [{"role": "developer", "content": "a"}]
    async with generation_server() as server, AsyncClient(server.address) as client:
        for template, role in (
            ("{{ messages[0].role }}", b"system"),
            ("{# developer #}{{ messages[0].role }}", b"dev"),
        ):
            give(server, tokenizer_with(template))
            assert b"".join(token for _, token in await client.tokenize(messages)).startswith(role)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 11 }}",
        "{% set n = namespace(x='ab') %}{% for a in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{{ 'a' * (2 ** 20 * 33) }}",
    ],
    ids=["endless", "large", "doubling", "long"],
)
def test_a_template_is_bounded_and_the_next_one_works(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemplateError) as caught:
        render(template, {})
    assert "\n" not in str(caught.value)
    assert render("{{ a }}", {"a": "é"}) == "é"


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("hermes", ("hermes", "think")),
        ("open thoughts", ("", "think_open")),
        ("llama3", ("llama3_json", "")),
        ("mistral", ("mistral", "")),
        ("parts", ("", "")),
        ("named", ("hermes", "think")),
    ],
)
def test_forms_are_found_in_the_template(name: str, formats: tuple[str, str]) -> None:
    assert formats_of(TEMPLATES[name]) == formats


def test_special_tokens_are_variables_where_thoughts_are_looked_for() -> None:
    template = "{{ bos_token + '|' }}{{ messages[0].content.split('</think>')[-1] }}<think>\n"
    assert formats_of(template, {"bos_token": "<s>"}) == ("", "think_open")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"mood": "\ud83d"}, "half of a surrogate pair"),
        ({"mood": reduce(lambda inner, _: [inner], range(2000), [])}, "nested"),
    ],
    ids=["surrogate", "deep"],
)
def test_what_cannot_be_a_text_is_refused(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render("é{{ mood }}", variables)


def test_other_forms_and_none() -> None:
    assert formats_of("{{ tools }}<tool_call><function=a>") == ("qwen3_coder", "")
    assert formats_of("<|start|><|channel|>final") == ("harmony", "harmony")
    assert formats_of("<tool_call>") == formats_of(None) == ("", "")


async def test_tokens_and_texts() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        tokenizer = server.model.tokenizer
        found = await client.tokenize("Hello 你<plain></s>")
        ids = [token for token, _ in found]
        assert ids == tokenizer.encode("Hello 你<plain></s>")
        assert b"".join(token for _, token in found) == "Hello 你<plain></s>".encode()
        assert await client.detokenize(ids) == "Hello 你<plain></s>"
        assert await client.detokenize(ids, skip_special_tokens=True) == "Hello 你<plain>"
        with pytest.raises(InvalidArgumentError) as caught:
            await client.detokenize([10**6])
        assert caught.value.field == "input_ids.ids[0]"


@pytest.mark.parametrize("kind", ["byte level", "llama", "metaspace, bytes", "wordpiece"])
async def test_logprobs_have_the_bytes_of_their_tokens(kind: str) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        vocabulary = server.model.vocabulary
        ids = server.model.tokenizer.encode("Hello 你é<plain> world", add_special_tokens=False)
        options = {"max_new_tokens": 2 * len(ids), "logprobs": True, "top_logprobs": 2}
        chunks = await collect(client.generate(ids, ignore_eos=True, **options))
        logprobs = [one for chunk in chunks for one in chunk.logprobs]
        for token, one in zip(tokens_of(chunks), logprobs, strict=True):
            assert one.token == vocabulary.token_bytes(token)
            assert one.top_tokens == tuple(vocabulary.token_bytes(top) for top, _ in one.top)
        assert b"".join(one.token for one in logprobs).decode() == text_of(chunks)


async def test_special_tokens_have_names_in_the_text_if_asked_for() -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        ids = server.model.tokenizer.encode("Hello<s> you", add_special_tokens=False)
        options = {"max_new_tokens": len(ids), "ignore_eos": True}
        assert text_of(await collect(client.generate(ids, **options))) == "Hello you"
        assert text_of(await collect(client.generate(ids, skip_special_tokens=False, **options))) == "Hello<s> you"


async def test_an_output_may_fill_the_context() -> None:
    async with generation_server(context_tokens=700) as server, AsyncClient(server.address) as client:
        assert len(tokens_of(await collect(client.generate([5, 6], fills_context=True)))) == 698
        assert len(tokens_of(await collect(client.generate([5, 6])))) == 256


def test_the_request_is_one_line_for_any_text() -> None:
    assert render("{{ a | tojson }}", {"a": ["\n\u2028é"]}) == json.dumps(["\n\u2028é"], ensure_ascii=False)
    assert chat_template.render("{{ strftime_now('%Y') }}", {}).isdigit()


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}"
    "<plain>{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<plain>assistant:{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Hello </s>é "},
]


@pytest.fixture
def templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Tokenizers are shared: what a test gives them is taken back."""
    with monkeypatch.context() as patch:
        yield patch


def give_template(server: GenerationServer, template: object, patch: pytest.MonkeyPatch) -> None:
    """Gives the model a template."""
    patch.setattr(server.model.tokenizer, "chat_template", template)


@pytest.mark.parametrize("kind", ["byte level", "llama"])
async def test_an_answer_begins_where_the_template_ends(kind: str, templates: pytest.MonkeyPatch) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        give_template(server, TEMPLATE, templates)
        tokenizer = server.model.tokenizer
        ids = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
        assert ids == tokenizer.encode(
            "<s><plain>system: Be kind.\n<plain>user: Hello </s>é\n<plain>assistant:", add_special_tokens=False
        )
        # The fake loop says the prompt over and over.
        chunks = await collect(client.generate(CONVERSATION, max_new_tokens=len(ids), ignore_eos=True))
        assert tokens_of(chunks) == ids
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == len(ids)
        text = "<s><plain>system: Be kind.\n<plain>user: Hello </s>é\n<plain>assistant:"
        if kind == "byte level":
            assert text_of(chunks) == text.replace("<s>", "").replace("</s>", "")
        # The name of a special token is that token, and ends the output.
        job = await client.create_job(CONVERSATION, job_id="chat")
        assert tokens_of(await collect(client.watch_job(job.job_id))) == ids[: ids.index(EOS_ID) + 1]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CONVERSATION, "the model has no chat template"),
        (TEMPLATE, CONVERSATION[::-1], "does not take them: the system speaks first"),
        ("{{ messages[0].content + 1 }}", CONVERSATION, "does not take them"),
        ("{{ messages.append(1) }}", CONVERSATION, "does not take them"),
        ("{{ ''.__class__.__mro__ }}", CONVERSATION, "does not take them"),
        ("{% for %}", CONVERSATION, "does not take them"),
        ("", CONVERSATION, "no tokens"),
    ],
)
async def test_a_conversation_that_a_template_does_not_take(
    template: str | None, messages: list[dict[str, str]], message: str, templates: pytest.MonkeyPatch
) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        give_template(server, template, templates)
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            await collect(client.generate(messages))
        assert caught.value.field == "messages"
        assert server.manager.num_jobs == 0


async def test_more_messages_than_are_looked_at_are_refused_before_they_are(templates: pytest.MonkeyPatch) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        give_template(server, TEMPLATE, templates)
        templates.setattr(service, "reject_unknown_fields", lambda _: pytest.fail("looked at"))
        with pytest.raises(InvalidArgumentError, match="got '4097 messages', accepted: at most 4096") as caught:
            await collect(client.generate([{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)))
        assert caught.value.field == "messages.items"
