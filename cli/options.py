"""The options of the commands that call a server."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from slipstream.common.errors import ConfigError, InvalidArgumentError
from slipstream.common.rpc.address import CONNECT_TIMEOUT_S, check_target
from slipstream.common.settings import Settings, duration, setting
from slipstream.gateway.config import LISTEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.client import AsyncClient
    from slipstream.client.connection import AccessOptions
    from slipstream.client.requests import Prompt, RequestOptions

StateDirOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="State directory of the `up` to ask, in place of --server.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonOutputOption = Annotated[
    bool, typer.Option("--json", help="Print a JSON line for each output at the end: text, token ids, a report.")
]
JobArgument = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]


RANDOM, SHAREGPT = "random", "sharegpt"
LIMITED = ("ttft", "tpot", "e2el")
"""The latencies that a good request may have limits of."""


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(Settings, heading="Connection"):
    """The options of commands that connect to a server; all but its address as in `AccessOptions` of the client."""

    server: str = setting(LISTEN, unit="ADDRESS", help="HOST:PORT or unix:PATH of the server.")
    api_key: str | None = setting(
        None,
        unit="TOKEN",
        help="API key. Visible in the process list; prefer the variable.",
        unset="the variable SLIPSTREAM_API_KEY",
    )
    tls: bool = setting(False, help="Connect with TLS, and trust the authorities that gRPC has.")
    tls_ca: Path | None = setting(None, unit="FILE", help="Connect with TLS, and trust these authorities, PEM.")
    tls_cert: Path | None = setting(None, unit="FILE", help="Mutual TLS: the client's certificate, PEM.")
    tls_key: Path | None = setting(None, unit="FILE", help="Mutual TLS: the certificate's private key, PEM.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_target(self.server, field="server")

    @property
    def access(self) -> AccessOptions:
        """Credentials, as the client takes them."""
        return cast("AccessOptions", {name: value for name, value in vars(self).items() if name != "server"})

    def client(self, **more: Any) -> AsyncClient:
        """A client of the server; `more` are further arguments of it. Raises ConfigError as `AsyncClient` does."""
        from slipstream.client import AsyncClient

        return AsyncClient(self.server, **more, **self.access)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Settings, heading="Request"):
    """Options of `generate` that become a request. None: the server's default. The server checks all values."""

    job_id: str | None = setting(
        None, unit="NAME", help="Job name; an equal request with this name follows the job.", unset="drawn"
    )
    chat: bool = setting(False, help="PROMPT is what a user says: apply the model's chat template.")
    max_new_tokens: int | None = setting(None, unit="N", help="Tokens to generate at most.", unset="the server's")
    min_new_tokens: int | None = setting(None, unit="N", help="Tokens before which nothing else ends the output.")
    temperature: float | None = setting(None, unit="T", help="0 takes the likeliest token; above, tokens are sampled.")
    seed: int | None = setting(None, unit="S", help="Equal seeds give equal tokens.", unset="drawn")
    top_k: int | None = setting(None, unit="K", help="Sample from the K likeliest tokens.")
    top_p: float | None = setting(None, unit="P", help="Sample from the likeliest tokens that sum to P.")
    min_p: float | None = setting(None, unit="P", help="Sample from tokens P times as likely as the likeliest.")
    repetition_penalty: float | None = setting(
        None, unit="P", help="Above 1, make tokens that are there already less likely."
    )
    frequency_penalty: float | None = setting(
        None, unit="P", help="Lower a token's logit by P for each time that the output has it."
    )
    presence_penalty: float | None = setting(None, unit="P", help="Lower a token's logit by P if the output has it.")
    n: int | None = setting(None, unit="N", help="Number of outputs for the prompt, each with its own seed.")
    stop: list[str] | None = setting(None, unit="TEXT", help="A text that ends the output; may be repeated.")
    stop_token_id: list[int] | None = setting(None, unit="ID", help="A token that ends the output; may be repeated.")
    logit_bias: list[str] | None = setting(
        None, unit="ID:BIAS", help="Make a token likelier, or with less than 0 less likely; may be repeated."
    )
    json_schema: Path | None = setting(None, unit="FILE", help="A JSON schema that the output, in JSON, keeps to.")
    json_object: bool = setting(False, help="The output is a JSON object.")
    regex: str | None = setting(None, unit="REGEX", help="A regular expression that the whole output matches.")
    grammar: Path | None = setting(None, unit="FILE", help="A grammar that the output keeps to: Lark or GBNF.")
    choice: list[str] | None = setting(None, unit="TEXT", help="The output is this text; may be repeated: one of them.")
    ignore_eos: bool = setting(False, help="Go on after the model's end of sequence.")
    no_speculation: bool = setting(False, help="Use no drafts.")
    max_draft_tokens: int | None = setting(
        None, unit="K", help="Draft tokens that may be accepted in a step; 0 uses no drafts.", unset="the server's"
    )
    cache_salt: str | None = setting(
        None,
        unit="TEXT",
        help="Share cached prompts only with requests of the same salt. Visible in the process list.",
    )
    priority: int | None = setting(None, unit="P", help="Requests of a higher priority start earlier.", unset="0")
    logprobs: int | None = setting(
        None, unit="N", help="With --json: each token's log-probability, and those of the N likeliest."
    )
    connect_timeout_s: float = duration(CONNECT_TIMEOUT_S, help="Time for a server's first answer.")

    def __post_init__(self) -> None:
        """Raises ConfigError naming the option."""
        super().__post_init__()
        self._biases()

    def prompt(self, text: str) -> Prompt:
        """The text, or a conversation that begins with it."""
        return [{"role": "user", "content": text}] if self.chat else text

    def request(self) -> RequestOptions:
        """The keyword arguments of `AsyncClient.generate`."""
        own = ("job_id", "chat", "no_speculation", "stop_token_id", "connect_timeout_s")
        named = {name: value for name, value in vars(self).items() if name not in own} | {
            "stop_token_ids": self.stop_token_id,
            "logit_bias": self._biases(),
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs,
            "speculation": False if self.no_speculation else None,
            "json_schema": _text_in(self.json_schema, "json_schema"),
            "json_object": self.json_object or None,
            "grammar": _text_in(self.grammar, "grammar"),
        }
        return cast("RequestOptions", named)

    def _biases(self) -> dict[int, float] | None:
        biases: dict[int, float] = {}
        for given in self.logit_bias or ():
            token, _, bias = given.partition(":")
            try:
                token_id, value = int(token), float(bias)
            except ValueError:
                raise ConfigError("logit_bias", given, "ID:BIAS, a token's id and a number from -100 to 100") from None
            if token_id in biases:
                raise ConfigError("logit_bias", given, "each token once")
            biases[token_id] = value
        return biases or None


def _text_in(path: Path | None, field: str) -> str | None:
    """The text of a file. Raises ConfigError."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, str(path), f"a file of text ({error})") from error


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Settings, heading="Load"):
    """The options of `bench` beside its server."""

    openai: str | None = setting(
        None, unit="URL", help="OpenAI's interface to load in place of --server, as http://HOST:PORT/v1."
    )
    model: str | None = setting(None, unit="NAME", help="With --openai: the model's name.")
    dataset: str = setting(RANDOM, help="Lengths: fixed ones, or like ShareGPT's.", choices=(RANDOM, SHAREGPT))
    input_len: int = setting(256, unit="N", help="Tokens of a prompt; the mean with sharegpt.", low=1, high=1_000_000)
    output_len: int = setting(128, unit="N", help="Tokens of an output; the mean with sharegpt.", low=1, high=1_000_000)
    num_prompts: int = setting(100, unit="N", help="Requests.", low=1, high=1_000_000)
    request_rate: float | None = setting(
        None, unit="R", help="Requests per second, a Poisson process.", unset="as --max-concurrency", above=0, high=1e6
    )
    max_concurrency: int | None = setting(
        None, unit="N", help="Requests in flight, each followed at once by the next.", unset="16", low=1, high=65536
    )
    temperature: float = setting(0.0, unit="T", help="Of all requests.", low=0, high=2)
    seed: int = setting(0, unit="S", help="Of prompts, lengths and times.", low=0, high=2**31)
    goodput: list[str] | None = setting(
        None, unit="METRIC:MS", help="Limit (ttft, tpot, e2el) that a good request keeps; may be repeated."
    )
    processes: int = setting(1, unit="N", help="Processes of the clients.", low=1, high=256)
    output: Path | None = setting(None, unit="FILE", help="Write all figures as JSON.")
    picture: Path | None = setting(None, unit="FILE", help="Draw the latencies as PNG or SVG; needs matplotlib.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits()
        if self.request_rate is not None and self.max_concurrency is not None:
            raise ConfigError("max_concurrency", self.max_concurrency, "none with --request-rate")
        if (self.openai is None) != (self.model is None):
            raise ConfigError("model", self.model, "a name with --openai, and only there")
        for name in ("output", "picture"):
            if (path := getattr(self, name)) is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ConfigError(name, str(path), "a file in a folder that exists")
        if self.picture is not None and self.picture.suffix not in (".png", ".svg"):
            raise ConfigError("picture", str(self.picture), "a name that ends in .png or .svg")

    def limits(self) -> dict[str, float]:
        """Limits of a good request in milliseconds, by metric."""
        found: dict[str, float] = {}
        for given in self.goodput or ():
            name, _, value = given.partition(":")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if name not in LIMITED or not found[name] > 0:
                raise ConfigError("goodput", given, "ttft, tpot or e2el, a colon, and milliseconds above 0")
        return found


@contextmanager
def naming_options(*others: str) -> Iterator[None]:
    """Renames the field in an error of a request to its source: the prompt, or an option of `generate`.

    `others`: options of another command, or further ones, that are named as their fields.
    """
    try:
        yield
    except InvalidArgumentError as error:
        name = error.field.rpartition(".")[2].partition("[")[0]
        name = {"stop_token_ids": "stop_token_id", "top_logprobs": "logprobs", "items": "choice"}.get(name, name)
        if name not in ("text", *(field.name for field in fields(GenerateOptions)), *others):
            raise
        option = "PROMPT" if name == "text" else "--" + name.replace("_", "-")
        raise InvalidArgumentError.described(option, error.description) from error
