"""Large bodies are read in pieces: as others are, and refused before much work where they have too many items."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from slipstream.common.errors import InvalidArgumentError
from slipstream.door.errors import ApiError
from slipstream.door.fields import (
    LARGE_BODY_BYTES,
    MAX_ITEMS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Request,
    parse,
)
from slipstream.door.responses import ResponsesRequest

IDS = list(range(300, 330))
NUMBERS = [*IDS, *range(50_000)]
LONG = 'a, [b] {c} \\" ' * 8000
MESSAGE = {"role": "user", "content": "[1, 2], " * 40}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1, 2, None]}}}

CASES: list[tuple[type[Request], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": NUMBERS, "max_tokens": 3, "logit_bias": {"5": 1}}),
    (CompletionRequest, {"prompt": [NUMBERS, IDS], "n": 2}),
    (CompletionRequest, {"prompt": [LONG, "b"], "user": None}),
    (CompletionRequest, {"prompt": LONG, "stop": ["a", "b"], "guided_json": None}),
    (CompletionRequest, {"prompt": [*NUMBERS, None]}),
    (CompletionRequest, {"prompt": [*NUMBERS, 1.5]}),
    (CompletionRequest, {"prompt": [*NUMBERS, True]}),
    (CompletionRequest, {"prompt": NUMBERS, "temperature": [1]}),
    (CompletionRequest, {"prompt": "a", "unknown": NUMBERS}),
    (CompletionRequest, {"prompt": "a", "stop": NUMBERS}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": NUMBERS}),
    (CompletionRequest, {"suffix": LONG}),
    (DetokenizeRequest, {"tokens": NUMBERS}),
    (ChatRequest, {"messages": [MESSAGE] * 900, "tools": [TOOL] * 300, "model": None}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}], "name": None}]}),
    (ChatRequest, {"messages": [*[MESSAGE] * 900, {"role": 5}]}),
    (ChatRequest, {"messages": [*[MESSAGE] * 900, {**MESSAGE, "other": 1}]}),
    (ChatRequest, {"messages": {"role": LONG}}),
    (ChatRequest, {"messages": [MESSAGE], "chat_template_kwargs": {"a": LONG, "b": None, "c": NUMBERS}}),
    (ResponsesRequest, {"input": [{"type": "message", **MESSAGE}] * 900}),
    (ResponsesRequest, {"input": LONG, "store": True}),
]


def outcome(body: bytes, kind: type[Request]) -> object:
    """The request as values, or what is wrong with it."""
    try:
        return msgspec.to_builtins(parse(body, kind))
    except ApiError as error:
        return error.content


@pytest.mark.parametrize(("kind", "fields"), CASES)
def test_a_large_body_is_read_as_a_small_one(
    kind: type[Request], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [json.dumps(fields, indent=indent).encode() for indent in (None, 1)]
    assert all(len(body) > LARGE_BODY_BYTES for body in bodies)
    monkeypatch.setattr("slipstream.door.fields.MANY_VALUES", 16)
    found = [outcome(body, kind) for body in bodies]
    monkeypatch.setattr("slipstream.door.fields.MANY_VALUES", 2**30)
    assert found == [outcome(body, kind) for body in bodies]


@pytest.mark.parametrize("end", [b"", b",]}", b"]]}", b'"]}', b"1]", b"[]}", b"]}]", b"]}x"])
def test_a_large_body_that_is_no_json_is_refused(end: bytes) -> None:
    with pytest.raises(ApiError, match="no JSON"):
        parse(b'{"prompt": [' + b"5," * LARGE_BODY_BYTES + end, CompletionRequest)


def test_more_items_than_are_taken_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = msgspec.json.decode

    def recorded(given: Any, *, type: Any = Any) -> Any:
        sizes.append(len(given) if type is Any else 0)
        return decode(given, type=type)

    monkeypatch.setattr(msgspec.json, "decode", recorded)
    for name, kind in (("messages", ChatRequest), ("tools", ChatRequest), ("prompt", CompletionRequest)):
        body = json.dumps({name: [{"role": "user", "content": ",,,,,,,,"}] * (MAX_ITEMS + 1)}).encode()
        with pytest.raises(ApiError, match=f"^{name}: got '{MAX_ITEMS + 1} items', accepted: at most {MAX_ITEMS}"):
            parse(body, kind)
        assert max(sizes) == 0
    numbers = json.dumps({"prompt": NUMBERS}).encode()
    with pytest.raises(InvalidArgumentError, match=r"^prompt: got '50030 tokens', accepted: at most 4096, the context"):
        parse(numbers, CompletionRequest, 4096)
    assert max(sizes) < 100
    # Numbers are decoded piece by piece.
    parse(json.dumps({"prompt": NUMBERS * 10}).encode(), CompletionRequest)
    assert len(sizes) > 20
    assert max(sizes) < 2 * LARGE_BODY_BYTES
