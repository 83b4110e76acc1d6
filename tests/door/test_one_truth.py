"""Both interfaces give the same: prompts as transformers, outputs, text, ends, usage and logprobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from slipstream.client import AsyncClient
from slipstream.common.wire.job import OutputChunk
from slipstream.door.answers import token_text
from slipstream.gateway.model import ServedModel
from tests.harness.chat_templates import PLAIN, TEMPLATES
from tests.harness.doors import RunningDoor, running_door
from tests.harness.generation_server import GenerationServer, collect, generation_server
from tests.harness.tokenizers_by_kind import KINDS, make_tokenizer

TEXT = "Hello 你好 é\n<plain> don't</s> x"
MORE = ("byte level, bos", "byte level, prefix space", "byte level, added tokens", "llama, bos", "gemma, bos and eos")
TEMPLATE_OF = dict(zip((*KINDS, *MORE), 3 * list(TEMPLATES), strict=False))
"""Each tokenizer has a template, and each template several tokenizers."""


def tokenizer_of(kind: str) -> Any:
    """A tokenizer with a template; of some kinds it adds tokens or a space to a text, or knows more tokens."""
    base, _, more = kind.partition(", ") if kind in MORE else (kind, "", "")
    made = make_tokenizer(base)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=type(made.backend_tokenizer).from_str(made.backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATES[TEMPLATE_OF[kind]],
    )
    backend = tokenizer.backend_tokenizer
    if "bos" in more:
        end = " </s>" if "eos" in more else ""
        ids = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
        backend.post_processor = processors.TemplateProcessing(single=f"<s> $A{end}", special_tokens=ids)
    if "prefix" in more:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    if "added" in more:
        tokenizer.add_tokens(["don't", "<tool_call>"])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    return tokenizer


def give(server: GenerationServer, tokenizer: Any) -> None:
    """Serves the model with another tokenizer."""
    limits = replace(server.model.limits, eos_token_ids=frozenset(), vocab_size=server.model.limits.vocab_size)
    server.model = ServedModel(tokenizer, limits, identity=server.model.identity)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "cut characters": {"max_tokens": 7},
    "sampled": {"seed": 5, "n": 3, "max_tokens": 9},
    "stop": {"stop": ["o", "你"], "max_tokens": 40},
    "min tokens": {"stop": "o", "min_tokens": 6, "max_tokens": 40},
    "eos": {"max_tokens": 60},
}


def ours(fields: dict[str, Any]) -> dict[str, Any]:
    """The same request by our names."""
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
    made = {names.get(name, name): value for name, value in fields.items()}
    return {"temperature": 1.0, "logprobs": True, "top_logprobs": 2} | made


def samples_of(chunks: list[OutputChunk], n: int) -> list[dict[str, Any]]:
    """What a client of gRPC gets of each sample."""
    found = []
    for index in range(n):
        of = [chunk for chunk in chunks if chunk.sample_index == index]
        found.append(
            {
                "text": "".join(chunk.text for chunk in of),
                "finish_reason": str(of[-1].finish_reason),
                "tokens": [token_text(one.token) for chunk in of for one in chunk.logprobs],
                "logprobs": [pytest.approx(one.logprob) for chunk in of for one in chunk.logprobs],
                "top": [
                    {token_text(token): value for token, (_, value) in zip(one.top_tokens, one.top, strict=True)}
                    for chunk in of
                    for one in chunk.logprobs
                ],
            }
        )
    return found


async def completion(door: RunningDoor, fields: dict[str, Any], *, stream: bool) -> tuple[list[dict[str, Any]], Any]:
    """What the `openai` package gets of each sample, and the usage."""
    extra = {name: fields[name] for name in ("min_tokens",) if name in fields}
    given = {name: value for name, value in fields.items() if name not in extra}
    request: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "logprobs": 2, "extra_body": extra, **given}
    if not stream:
        whole = await door.openai.completions.create(**request)
        parts, usage = list(whole.choices), whole.usage
    else:
        events = await door.openai.completions.create(stream=True, stream_options={"include_usage": True}, **request)
        chunks = [event async for event in events]
        parts, usage = [choice for chunk in chunks for choice in chunk.choices], chunks[-1].usage
    found = []
    for index in range(fields.get("n", 1)):
        of = [part for part in parts if part.index == index]
        logprobs = [part.logprobs for part in of if part.logprobs is not None]
        found.append(
            {
                "text": "".join(part.text for part in of),
                "finish_reason": of[-1].finish_reason,
                "tokens": [token for one in logprobs for token in one.tokens or ()],
                "logprobs": [value for one in logprobs for value in one.token_logprobs or ()],
                "top": [top for one in logprobs for top in one.top_logprobs or ()],
            }
        )
    return found, usage


async def chat(door: RunningDoor, fields: dict[str, Any], *, stream: bool) -> tuple[list[dict[str, Any]], Any]:
    """The same for a conversation."""
    extra = {name: fields[name] for name in ("min_tokens",) if name in fields}
    given = {name: value for name, value in fields.items() if name not in extra}
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": PLAIN,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": extra,
        **given,
    }
    if not stream:
        whole = await door.openai.chat.completions.create(**request)
        parts: list[Any] = [(one.index, one.message, one) for one in whole.choices]
        usage = whole.usage
    else:
        events = await door.openai.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **request
        )
        chunks = [event async for event in events]
        parts = [(one.index, one.delta, one) for chunk in chunks for one in chunk.choices]
        usage = chunks[-1].usage
    found = []
    for index in range(fields.get("n", 1)):
        of = [part for part in parts if part[0] == index]
        logprobs = [entry for _, _, one in of if one.logprobs is not None for entry in one.logprobs.content or ()]
        found.append(
            {
                "text": "".join(message.content or "" for _, message, _ in of),
                "finish_reason": of[-1][2].finish_reason,
                "tokens": [entry.token for entry in logprobs],
                "logprobs": [entry.logprob for entry in logprobs],
                "top": [{top.token: top.logprob for top in entry.top_logprobs} for entry in logprobs],
            }
        )
    return found, usage


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", TEMPLATE_OF)
async def test_both_interfaces_give_the_same(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    async with (
        generation_server(kind="byte level") as server,
        AsyncClient(server.address) as client,
        running_door(server.address, reasoning_parser="none") as door,
    ):
        give(server, tokenizer)
        for prompt, call, expected_ids in (
            (TEXT, completion, tokenizer(TEXT)["input_ids"]),
            (PLAIN, chat, tokenizer.apply_chat_template(PLAIN, add_generation_prompt=True, return_dict=False)),
        ):
            for name, fields in CASES.items():
                given = fields if "max_tokens" in fields else {"max_tokens": 16, **fields}
                chunks = await collect(client.generate(prompt, **ours(given)))
                ids = server.loop.submitted[-1].spec.prompt
                assert list(ids) == expected_ids
                usages = [chunk.job_usage for chunk in chunks if chunk.job_usage is not None]
                for stream in (False, True):
                    found, usage = await call(door, given, stream=stream)
                    assert list(server.loop.submitted[-1].spec.prompt) == expected_ids
                    assert found == samples_of(chunks, given.get("n", 1)), (kind, name, stream)
                    assert usage.prompt_tokens == usages[0].prompt_tokens
                    assert usage.completion_tokens == usages[0].completion_tokens
