"""Constraints of outputs: what reaches the scheduler, and what is refused by its name before that."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from slipstream.client import AsyncClient
from slipstream.common.errors import InvalidArgumentError
from slipstream.common.grammars import load_grammar_tokenizer, new_matcher
from slipstream.gateway.bounded_process import BoundedProcess
from slipstream.gateway.request import MAX_CONSTRAINT_CHARACTERS
from tests.harness.constraint_corpus import EOS_ID, bundled_tokenizer, cases
from tests.harness.example_states import CONTEXT_TOKENS, STATE, VOCAB_SIZE
from tests.harness.generation_server import GenerationServer, generation_server, killed
from tests.harness.scripted_scheduler import DESCRIPTION, ScriptedScheduler
from tests.harness.tokenizers_by_kind import make_tokenizer
from tests.harness.waiting import until

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG = {"triggers": ["<f="], "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}]}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer of the test's server."""
    path = tmp_path_factory.mktemp("model")
    make_tokenizer("byte level").save_pretrained(path)
    return path


@asynccontextmanager
async def constraining(
    model_path: Path, journal: Path | None = None, **changes: Any
) -> AsyncIterator[tuple[GenerationServer, AsyncClient]]:
    """A server whose scheduler has a grammar worker, as it says, and a client of it."""
    server = replace(STATE, context_tokens=CONTEXT_TOKENS)
    described = replace(DESCRIPTION, server=server, tokenizer_path=str(model_path), constraints=True)
    scheduler = ScriptedScheduler(replace(described, **changes))
    async with (
        generation_server(scheduler=scheduler, tokenizer_path=str(model_path), journal=journal) as running,
        AsyncClient(running.address) as client,
    ):
        yield running, client


@pytest.fixture
async def server_and_client(model_path: Path) -> AsyncIterator[tuple[GenerationServer, AsyncClient]]:
    """See `constraining`."""
    async with constraining(model_path) as running:
        yield running


async def grammar_of(server: GenerationServer, client: AsyncClient, **fields: Any) -> str:
    """The grammar that a request's sequences have at the scheduler."""
    job = await client.create_job([20, 30], max_new_tokens=2, **fields)
    await until(lambda: any(one.spec.job_id == job.job_id for one in server.loop.submitted))
    grammars = {one.spec.grammar for one in server.loop.submitted if one.spec.job_id == job.job_id}
    assert len(grammars) == 1
    return grammars.pop()


async def refusal(client: AsyncClient, **fields: Any) -> InvalidArgumentError:
    """The error that a request is refused with."""
    with pytest.raises(InvalidArgumentError) as caught:
        await client.create_job([20, 30], **fields)
    return caught.value


TAKEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json_schema": OBJECT},
        ['{"a":1}', '{"a": 7}', '{\n    "a": -3\n}'],
        ["1", '{"a":"b"}', '{"a":1,"b":2}', '{  "a":1}'],
    ),
    ({"json_schema": json.dumps(OBJECT, indent=2)}, ['{"a":1}'], ["[]"]),
    ({"json_schema": True}, ["3", '["a"]'], ["x"]),
    ({"json_object": True}, ["{}", '{"x": [1, {}]}'], ["[]", "1", "{", " {}"]),
    ({"regex": "[ab]{2}|/x"}, ["ab", "/x"], ["a", "abc", "x"]),
    ({"regex": "^a+$"}, ["aaa"], ["b", "a\n"]),
    ({"grammar": 'start: "a" (b | "<" start ">")\nb: /[0-9]+/'}, ["a12", "a<a1>"], ["a", "a<a1"]),
    ({"grammar": 'root ::= "a" item+\nitem ::= [0-9] | "-" root'}, ["a12", "a-a1"], ["a", "b"]),
    ({"choice": ["yes", "no (a|b)*.", "ö\n\"/\\-'</"]}, ["yes", "no (a|b)*.", "ö\n\"/\\-'</"], ["y", "no ", "yesno"]),
    ({"structural_tag": TAG}, ["hi", 'hi <f=a>{"a":1}</f> there'], ["hi <f=b>", 'hi <f=a>{"b":1}']),
]
"""Fields of a request, outputs that keep to them, and outputs that do not."""


async def test_a_constraint_reaches_the_scheduler_as_a_grammar(server_and_client: Any, model_path: Path) -> None:
    server, client = server_and_client
    tokenizer = load_grammar_tokenizer(model_path, VOCAB_SIZE, [1])
    for number, (fields, accepted, refused) in enumerate(TAKEN, 1):
        grammar = await grammar_of(server, client, **fields, n=2)
        assert await grammar_of(server, client, **fields) == grammar
        assert server.metric("grammar_compile_seconds_count") == number  # the second one was compiled already
        for text, is_whole in [*((text, True) for text in accepted), *((text, False) for text in refused)]:
            matcher = new_matcher(tokenizer, grammar)
            tokens = make_tokenizer("byte level").encode(text, add_special_tokens=False)
            whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert whole == is_whole, (fields, text)


async def test_no_constraint_is_no_grammar(server_and_client: Any) -> None:
    server, client = server_and_client
    assert await grammar_of(server, client) == ""
    assert server.metric("grammar_compile_seconds_count") == 0


async def test_a_name_of_a_special_token_in_a_mark_is_that_token(server_and_client: Any, model_path: Path) -> None:
    server, client = server_and_client
    tag = {"type": "tag", "begin": "<s>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": "<s>"}
    grammar = await grammar_of(server, client, structural_tag={"type": "structural_tag", "format": tag})
    matcher = new_matcher(load_grammar_tokenizer(model_path, VOCAB_SIZE, [1]), grammar)
    backend = make_tokenizer("byte level")
    inner = backend.encode('{"a":1}', add_special_tokens=False)
    assert matcher.try_consume_tokens([0, *inner, 0]) == len(inner) + 2
    assert matcher.is_accepting()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": "{"}, "json_schema", "line 1"),
    ({"json_schema": '"a"'}, "json_schema", "accepted: a schema"),
    ({"json_schema": {"properties": {"b": {"not": {}}}}}, "json_schema", "properties.b.not: the keyword is not"),
    ({"json_schema": {"items": [{"minLenght": 3}]}}, "json_schema", "items[0].minLenght: the keyword is not"),
    ({"json_schema": {"$defs": {"a": {"nullable": True}}}}, "json_schema", "$defs.a.nullable"),
    ({"json_schema": {"x-guidance": {"lenient": True}}}, "json_schema", "x-guidance"),
    ({"json_schema": {"format": "colour"}}, "json_schema", "format: got 'colour', accepted: date, "),
    ({"json_schema": {"exclusiveMinimum": True, "minimum": 1}}, "json_schema", "exclusiveMinimum: got True"),
    ({"json_schema": {"pattern": "(?=a)b"}}, "json_schema", "look-ahead"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema", "greater than maximum"),
    ({"json_schema": {"$ref": "https://example.org/a"}}, "json_schema", "not fetch"),
    ({"json_schema": {"$ref": "#"}}, "json_schema", "no token can be the first"),
    ({"json_schema": False}, "json_schema", "the schema is false"),
    ({"json_schema": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}, "json_schema", "oneOf"),
    ({"json_schema": ""}, "json_schema", "not empty"),
    ({"json_object": False}, "json_object", "accepted: true"),
    ({"regex": ""}, "regex", "not empty"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": r"(a)\1"}, "regex", "backreferences"),
    ({"regex": r"[^\s\S]"}, "regex", "no token can be the first"),
    ({"grammar": "start: missing"}, "grammar", "missing"),
    ({"grammar": "root ::= missing"}, "grammar", "missing"),
    ({"grammar": "hello"}, "grammar", "::="),
    ({"grammar": 'start: start "a"'}, "grammar", "no token can be the first"),
    ({"grammar": 'start: %json {"not": {}}'}, "grammar", "not: the keyword is not"),
    ({"grammar": "start: <|nothing|>"}, "grammar", "unknown special token"),
    ({"choice": []}, "choice", "at least one text"),
    ({"choice": ["a", ""]}, "choice.items[1]", "at least one character"),
    ({"choice": ["a", "</s>"]}, "choice.items[1]", "special tokens"),
    ({"structural_tag": "[]"}, "structural_tag", "got [], accepted: an object"),
    ({"structural_tag": {"structures": TAG["structures"]}}, "structural_tag", "accepted: format, or"),
    ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "structural_tag", "begins with one of triggers"),
    ({"structural_tag": {"format": {"type": "qwen_xml"}}}, "structural_tag", "accepted: const_string"),
    ({"structural_tag": {"format": {"type": "regex", "pattern": "a", "x": 1}}}, "structural_tag", "format.x"),
    ({"regex": "a", "min_new_tokens": 1}, "sampling_params.min_new_tokens", "0 with a constraint"),
    ({"regex": "a", "ignore_eos": True}, "sampling_params.ignore_eos", "false with a constraint"),
]
"""Fields of a request, the field that the error names, and a part of the reason."""


async def test_what_cannot_be_honoured_is_refused_by_its_name(server_and_client: Any) -> None:
    server, client = server_and_client
    for fields, field, reason in REFUSED:
        error = await refusal(client, **fields)
        assert (error.field, reason in error.description) == (field, True), (fields, error)
        assert "\n" not in error.description
    assert server.manager.num_jobs == 0
    assert 20 < server.metric("grammars_refused_total") < len(REFUSED)


def test_an_output_has_one_constraint() -> None:
    with pytest.raises(InvalidArgumentError, match="regex: got 'a', accepted: none beside json_object"):
        asyncio.run(refused_here(json_object=True, regex="a"))
    with pytest.raises(InvalidArgumentError, match="choice: got 'abc', accepted: a list of texts"):
        asyncio.run(refused_here(choice="abc"))


async def refused_here(**fields: Any) -> None:
    """A request that does not leave the client."""
    async with AsyncClient("127.0.0.1:9") as client:
        await client.create_job("a", **fields)


async def test_without_a_grammar_worker_a_constraint_is_refused(model_path: Path) -> None:
    async with constraining(model_path, constraints=False) as (_, client):
        error = await refusal(client, regex="a")
        assert str(error) == "regex: got 'a', accepted: none: this server has no grammar worker"


async def test_without_the_package_a_constraint_is_refused(
    server_and_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.gateway.constraints.find_spec", lambda _: None)
    error = await refusal(server_and_client[1], regex="a")
    assert str(error) == "regex: got 'a', accepted: none: the package llguidance is missing"


async def test_a_tokenizer_that_cannot_be_constrained_is_named(tmp_path: Path) -> None:
    make_tokenizer("wordpiece").save_pretrained(tmp_path)
    async with constraining(tmp_path) as (_, client):
        assert "outputs cannot be constrained" in (await refusal(client, regex="a")).description


ENDLESS: list[dict[str, Any]] = [
    {"json_schema": {"type": "integer", "multipleOf": 9999991}},  # never ends
    {"grammar": "start: A\nA: " + " & ".join(f"/(.*{a}.{{9}})/" for a in "abcdefghijklmn")},
    {"json_schema": '{"items": ' * 9000 + "true" + "}" * 9000},
    {"json_schema": {"allOf": [{"anyOf": [{"minLength": a} for a in range(10)]} for _ in range(8)]}},
    {"choice": ["a" * MAX_CONSTRAINT_CHARACTERS, "b"]},
    {"json_schema": {"description": "a" * 4_000_000}},
    {"grammar": "start: A0\n" + "\n".join(f'A{n}: "a" (A{n + 1} | "b{n}")' for n in range(1700)) + '\nA1700: "c"'},
    {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    {"regex": "(" * 50_000 + "a" + ")" * 50_000},
]


async def test_work_without_end_is_refused_and_holds_up_nobody(server_and_client: Any) -> None:
    """Each takes at most a second of a processor, by which other requests wait for no fraction of it."""
    server, client = server_and_client
    waits_s: list[float] = []

    async def probe() -> None:
        while True:
            begun_at = time.monotonic()
            await client.tokenize("Hello")
            waits_s.append(time.monotonic() - begun_at)
            await asyncio.sleep(0.01)

    probing = asyncio.create_task(probe())
    for fields in ENDLESS:
        for _ in range(3):  # the machine itself may stand still for a while
            waits_s.clear()
            begun_at = time.monotonic()
            error = await refusal(client, **fields)
            took_s = time.monotonic() - begun_at
            print(f"{took_s:.2f} s, probes at most {max(waits_s, default=0):.3f} s: {error}")
            assert error.field == next(iter(fields)), error
            if took_s < 1 or max(waits_s, default=took_s) < took_s / 2:
                break
        else:
            pytest.fail("other requests wait for it")
        # The next constraint is compiled as before.
        assert await grammar_of(server, client, regex="a+")
    probing.cancel()


async def test_a_lost_process_is_no_fault_of_the_constraint(
    server_and_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = server_and_client
    exchange, lost = BoundedProcess._exchange, [True]
    monkeypatch.setattr(BoundedProcess, "_exchange", lambda *asked: None if lost and lost.pop() else exchange(*asked))
    assert await grammar_of(server, client, regex="a{7}")


async def test_long_grammars_go_in_several_messages_and_count_as_memory(server_and_client: Any) -> None:
    """16 of them are more than the scripted scheduler takes in a message."""
    server, client = server_and_client
    server.loop.pause_tokens = 0
    schema = {"type": "object", "description": "a" * (MAX_CONSTRAINT_CHARACTERS - 100)}
    job = await client.create_job([20, 30], job_id="long", json_schema=schema, n=16, max_new_tokens=4)
    await until(lambda: len(server.loop.submitted) == 16)
    server.loop.break_streams()
    await until(lambda: len(server.loop.submitted) == 32)
    assert {len(one.spec.grammar) > MAX_CONSTRAINT_CHARACTERS - 100 for one in server.loop.submitted} == {True}
    kept = server.store.get("", job.job_id)
    assert kept is not None
    assert kept.num_bytes > MAX_CONSTRAINT_CHARACTERS - 100


async def test_another_tokenizer_in_the_directory_has_grammars_of_its_own(server_and_client: Any) -> None:
    server, client = server_and_client
    for number, identity in enumerate(("a", "b"), 1):
        server.model.identity = identity
        assert await grammar_of(server, client, regex="a+")
        assert server.metric("grammar_compile_seconds_count") == number


async def test_ten_thousand_alternatives_are_taken(server_and_client: Any) -> None:
    server, client = server_and_client
    assert await grammar_of(server, client, choice=[f"item number {number}" for number in range(10_000)])


async def test_a_constraint_outlives_the_gateway(model_path: Path, tmp_path: Path) -> None:
    journal = tmp_path / "jobs.sqlite3"
    async with constraining(model_path, journal=journal) as (server, client):
        server.loop.pause_tokens = 0
        grammar = await grammar_of(server, client, regex="a+")
        left = killed(journal)
    async with constraining(model_path, journal=left) as (server, _):
        await until(lambda: len(server.loop.submitted) == 1)
        assert server.loop.submitted[0].spec.grammar == grammar != ""


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        ({"json_schema": json.dumps(OBJECT)}, {"json_schema": OBJECT}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"choice": {"choices": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structural_tag": json.dumps(TAG)}, {"structural_tag": TAG}),
    ],
    ids=str,
)
async def test_a_constraint_of_the_vllm_engine_is_the_same(
    server_and_client: Any, constraint: dict[str, Any], fields: dict[str, Any]
) -> None:
    server, client = server_and_client
    params = pb.SamplingParams(max_tokens=2, **constraint)
    request = pb.GenerateRequest(request_id="x", tokenized={"input_ids": [20, 30]}, sampling_params=params)
    async with grpc.aio.insecure_channel(server.address) as channel:
        await anext(aiter(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)))
    (submitted,) = server.loop.submitted
    assert submitted.spec.grammar == await grammar_of(server, client, **fields) != ""


async def test_the_vllm_engine_names_its_own_fields(server_and_client: Any) -> None:
    params = pb.SamplingParams(choice={"choices": ["a", ""]})
    request = pb.GenerateRequest(request_id="x", tokenized={"input_ids": [20, 30]}, sampling_params=params)
    async with grpc.aio.insecure_channel(server_and_client[0].address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling_params.choice.choices\[1\]: got ''"):
            await anext(aiter(vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)))


CASES = {case.name: case for case in cases()}
FREE_TOKENS, MOST_TOKENS = 60, 2000
"""Tokens that are drawn evenly, and from which on the walk has failed; in between it makes for the end."""


@cache
def short_tokens() -> tuple[np.ndarray, np.ndarray]:
    """For each token, whether it is a single byte, and whether that closes something."""
    texts = [bundled_tokenizer().decode_bytes([token]) for token in range(bundled_tokenizer().vocab_size)]
    is_closing = [text in (b'"', b"]", b"}", b")") for text in texts]
    return np.array([len(text) == 1 for text in texts]), np.array(is_closing)


def walk(grammar: str, seed: int) -> str:
    """An output of tokens drawn among those allowed, which ends where it may."""
    draw = random.Random(seed)
    matcher, tokens = new_matcher(bundled_tokenizer(), grammar), list[int]()
    while True:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask)
        assert not matcher.is_error(), matcher.get_error()
        assert len(allowed), f"nothing may follow {bundled_tokenizer().decode_str(tokens)!r}"
        assert (allowed[0] == EOS_ID) == matcher.is_accepting()
        if allowed[0] == EOS_ID and (len(tokens) >= FREE_TOKENS or draw.random() < 0.3):
            return bundled_tokenizer().decode_bytes(tokens).decode()
        if len(tokens) >= FREE_TOKENS:
            single, closing = short_tokens()
            for kind in (single, closing) if draw.random() < 0.5 else (single,):
                allowed = allowed[kind[allowed]] if kind[allowed].any() else allowed
        token = int(draw.choice(allowed))
        if token == EOS_ID:
            return bundled_tokenizer().decode_bytes(tokens).decode()
        assert matcher.consume_token(token)
        tokens.append(token)
        assert len(tokens) < MOST_TOKENS, bundled_tokenizer().decode_str(tokens)[-100:]


def test_the_corpus_is_compiled() -> None:
    fields = [case.field for case in CASES.values()]
    assert all(fields.count(field) >= least for field, least in (("json_schema", 60), ("regex", 20), ("grammar", 10)))
    assert len(CASES) == len(cases())
    for case in CASES.values():
        assert case.grammar


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
def test_whatever_a_mask_allows_keeps_to_the_constraint(name: str) -> None:
    grammar = CASES[name].grammar
    seed = random.randrange(2**32)
    for number in range(seed, seed + 6):
        text = walk(grammar, number)
        print(f"seed {number}: {text!r}")
        CASES[name].check(text)
