"""Conversations through the chat templates of real tokenizers, over a real connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from slipstream.client import AsyncClient
from slipstream.common.errors import InvalidArgumentError
from slipstream.gateway import service
from slipstream.gateway.request import MAX_MESSAGES
from tests.harness.generation_server import collect, generation_server, text_of, tokens_of
from tests.harness.scripted_scheduler import EOS_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.generation_server import GenerationServer

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


def give(server: GenerationServer, template: object, patch: pytest.MonkeyPatch) -> None:
    """Gives the model a template."""
    patch.setattr(server.model.tokenizer, "chat_template", template)


@pytest.mark.parametrize("kind", ["byte level", "llama"])
async def test_an_answer_begins_where_the_template_ends(kind: str, templates: pytest.MonkeyPatch) -> None:
    async with generation_server(kind=kind) as server, AsyncClient(server.address) as client:
        give(server, TEMPLATE, templates)
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
        give(server, template, templates)
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            await collect(client.generate(messages))
        assert caught.value.field == "messages"
        assert server.manager.num_jobs == 0


async def test_more_messages_than_are_looked_at_are_refused_before_they_are(templates: pytest.MonkeyPatch) -> None:
    async with generation_server() as server, AsyncClient(server.address) as client:
        give(server, TEMPLATE, templates)
        templates.setattr(service, "reject_unknown_fields", lambda _: pytest.fail("looked at"))
        with pytest.raises(InvalidArgumentError, match="got '4097 messages', accepted: at most 4096") as caught:
            await collect(client.generate([{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)))
        assert caught.value.field == "messages.items"
