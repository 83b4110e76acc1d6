"""The options of `slipstream generate` that become a request."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

from slipstream.common.settings import Settings, setting

if TYPE_CHECKING:
    from slipstream.client.requests import Prompt, RequestOptions


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Settings):
    """None leaves a parameter to the server, which also checks them all."""

    chat: bool = setting(False, help="PROMPT is what a user says: apply the model's chat template.")
    max_new_tokens: int | None = setting(None, unit="N", help="Tokens to generate at most.", unset="the server's")
    min_new_tokens: int | None = setting(None, unit="N", help="Tokens before which nothing else ends the output.")
    temperature: float | None = setting(None, unit="T", help="0 takes the likeliest token; above, tokens are sampled.")
    seed: int | None = setting(None, unit="S", help="The same seed gives the same tokens.", unset="drawn")
    top_k: int | None = setting(None, unit="K", help="Sample from the K likeliest tokens.")
    top_p: float | None = setting(None, unit="P", help="Sample from the likeliest tokens that sum to P.")
    min_p: float | None = setting(None, unit="P", help="Sample from tokens P times as likely as the likeliest.")
    repetition_penalty: float | None = setting(
        None, unit="P", help="Above 1, tokens that are there already become less likely."
    )
    frequency_penalty: float | None = setting(
        None, unit="P", help="Less likely by this for each time that the output has a token."
    )
    presence_penalty: float | None = setting(
        None, unit="P", help="Less likely by this, once, if the output has a token."
    )
    n: int | None = setting(None, unit="N", help="Outputs for the prompt, each with a seed of its own.")
    stop: list[str] | None = setting(None, unit="TEXT", help="A text that ends the output; may be repeated.")
    stop_token_id: list[int] | None = setting(None, unit="ID", help="A token that ends the output; may be repeated.")
    ignore_eos: bool = setting(False, help="Go on after the model's end of sequence.")
    no_speculation: bool = setting(False, help="Use no drafts.")
    logprobs: int | None = setting(
        None, unit="N", help="With --json: each token's log-probability, and those of the N likeliest."
    )

    def prompt(self, text: str) -> Prompt:
        """The text, or a conversation that begins with it."""
        return [{"role": "user", "content": text}] if self.chat else text

    def request(self) -> RequestOptions:
        """The keyword arguments of `AsyncClient.generate`."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("chat", "no_speculation", "stop_token_id"):
            del named[name]
        named |= {
            "stop_token_ids": self.stop_token_id,
            "logprobs": self.logprobs is not None,
            "top_logprobs": self.logprobs,
            "speculation": False if self.no_speculation else None,
        }
        return cast("RequestOptions", named)
