"""The prompt of a request as token ids: from a text, from a conversation, or as given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from slipstream.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.protos import generation_pb2

    JobRequest = generation_pb2.GenerateRequest | generation_pb2.CreateJobRequest

ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 4096
"""Millions of them fit into a request, and each takes a microsecond of the event loop's time."""


class Tokenizer(Protocol):
    """The part of a tokenizer that reads prompts."""

    chat_template: Any
    """None if the model has none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the model's tokenizer adds of its own accord or without them."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """The text of a conversation, rendered in a sandbox; raises what the model's template raises."""
        ...


def read_prompt(request: JobRequest, tokenizer: Tokenizer, *, vocab_size: int, context_tokens: int) -> tuple[int, ...]:
    """The prompt's token ids. Raises InvalidArgumentError naming the field that cannot be honoured."""
    field = request.WhichOneof("prompt")
    if field is None:
        raise InvalidArgumentError("prompt", None, "one of text, input_ids and messages")
    if field == "input_ids":
        prompt = tuple(request.input_ids.ids)
        _check_length(prompt, context_tokens, "input_ids.ids")
        check_ids(prompt, vocab_size, "input_ids.ids")
        return prompt
    if field == "text":
        if not request.text:
            raise InvalidArgumentError("text", "", "at least one character")
        prompt = tuple(tokenizer.encode(request.text))
    else:
        # The template writes the special tokens itself.
        prompt = tuple(tokenizer.encode(_render(request.messages, tokenizer), add_special_tokens=False))
    _check_length(prompt, context_tokens, field)
    if max(prompt) >= vocab_size:
        accepted = f"{field} that the tokenizer turns into token ids of 0 to {vocab_size - 1}"
        raise InvalidArgumentError(field, f"token id {max(prompt)}", accepted)
    return prompt


def check_num_messages(request: JobRequest) -> None:
    """Raises InvalidArgumentError for too many messages."""
    given = len(request.messages.items)
    if given > MAX_MESSAGES:
        raise InvalidArgumentError("messages.items", f"{given} messages", f"at most {MAX_MESSAGES}")


def check_ids(ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises InvalidArgumentError for an id outside the vocabulary."""
    # `max` is one pass in C for the usual case.
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise InvalidArgumentError(f"{field}[{index}]", ids[index], f"token ids of 0 to {vocab_size - 1}")


def _render(messages: generation_pb2.ChatMessages, tokenizer: Tokenizer) -> str:
    if not messages.items:
        raise InvalidArgumentError("messages.items", [], "at least one message")
    for index, message in enumerate(messages.items):
        if message.role not in ROLES:
            raise InvalidArgumentError(f"messages.items[{index}].role", message.role, ", ".join(ROLES))
    if tokenizer.chat_template is None:
        accepted = "text or input_ids: the model has no chat template"
        raise InvalidArgumentError("messages", f"{len(messages.items)} messages", accepted)
    conversation = [{"role": message.role, "content": message.content} for message in messages.items]
    try:
        return tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        # A template is a program of the model's and may raise anything.
        raise InvalidArgumentError.described(
            "messages", f"the model's chat template does not take them: {error}"
        ) from error


def _check_length(prompt: Sequence[int], context_tokens: int, field: str) -> None:
    if not prompt:
        raise InvalidArgumentError(field, "no tokens", "at least one token")
    if len(prompt) >= context_tokens:
        accepted = f"at most {context_tokens - 1}, which leaves one of the context's for the output"
        raise InvalidArgumentError(field, f"{len(prompt)} tokens", accepted)
