"""/v1/completions."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import InvalidArgumentError
from slipstream.door.answers import Answer, token_text
from slipstream.door.constraints import constraint_of
from slipstream.door.fields import CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.common.wire.job import OutputChunk
    from slipstream.common.wire.server import ServerState
    from slipstream.door.call import Call


async def completions(call: Call) -> None:
    """Answers a request, with a stream or without."""
    request, state = await call.read(CompletionRequest)
    prompts, options = request.prompts, request.options(state.sampling_defaults)
    for num_tokens in [len(prompt) for prompt in prompts if isinstance(prompt, list)]:
        if num_tokens >= state.context_tokens:
            # Before a message is made of them, which takes long for a million.
            raise InvalidArgumentError(
                "prompt", f"{num_tokens} tokens", f"at most {state.context_tokens - 1}: the context"
            )
    texts = [one if isinstance(one, str) else await call.client.detokenize(one) for one in prompts if request.echo]
    echoes = [text for text in texts or [""] * len(prompts) for _ in range(request.n or 1)]
    call.constrain(options, constraint_of(request))
    outputs = await call.aside(lambda: [call.generate(prompt, options) for prompt in prompts])
    await call.send(_Completions(request, state, echoes), outputs)


class _Completions(Answer):
    def __init__(self, request: CompletionRequest, state: ServerState, echoes: list[str]) -> None:
        """`echoes`: for each choice, the text before its own."""
        super().__init__("cmpl", "text_completion", request, state)
        self._echoes = echoes
        self._has_logprobs = request.logprobs is not None
        self._num_characters = [0] * len(echoes)
        """For each choice, those of the tokens with logprobs so far."""

    def parts(self, index: int, chunk: OutputChunk) -> Sequence[dict[str, Any]]:
        choice = self.choice(index, chunk)
        return [choice] if choice["text"] or choice["finish_reason"] or choice["logprobs"] else ()

    def choice(self, index: int, output: OutputChunk) -> dict[str, Any]:
        text, self._echoes[index] = self._echoes[index] + output.text, ""
        logprobs = self._logprobs(index, output) if self._has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        *offsets, self._num_characters[index] = accumulate(chunk.text_lengths, initial=self._num_characters[index])
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in chunk.logprobs],
            "tokens": [token_text(one.token) for one in chunk.logprobs],
            "top_logprobs": [
                {token_text(token): value for token, (_, value) in zip(one.top_tokens, one.top, strict=True)}
                for one in chunk.logprobs
            ],
        }
