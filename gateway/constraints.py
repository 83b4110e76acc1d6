"""Compiles what outputs keep to: JSON, a regular expression, a grammar."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from slipstream.common.errors import InvalidArgumentError
from slipstream.common.wire.sequence import MAX_GRAMMAR_CHARACTERS
from slipstream.gateway.bounded_process import BoundedProcess

if TYPE_CHECKING:
    from slipstream.gateway.metrics import RequestMetrics
    from slipstream.gateway.model import ServedModel
    from slipstream.gateway.request import Constraint
    from slipstream.gateway.tokenize_queue import TokenizeQueue

MAX_KEPT_CHARACTERS = 2**25
"""Characters of the grammars that are kept for the next request with the same constraint."""
_TOO_LONG = "it takes more than a second, or too much memory, to compile, or its rules refer to one another too deeply"


class GrammarCompiler:
    """Compiles constraints for the tokenizer of the model, in a process of its own. Belongs to the event loop.

    What was compiled, or refused, is kept for the next request with the same constraint.
    """

    def __init__(self, turns: TokenizeQueue, metrics: RequestMetrics) -> None:
        """`turns`: its threads wait for the process, which compiles one constraint at a time."""
        self._turns = turns
        self._metrics = metrics
        self._kept: OrderedDict[tuple[str, bytes], dict[str, str]] = OrderedDict()
        self._num_characters = 0
        self._process: BoundedProcess | None = None
        """Used on a thread of `turns`."""
        self._process_key = ""

    async def compile(self, constraint: Constraint, model: ServedModel, client: str) -> str:
        """Returns the serialised grammar. Raises InvalidArgumentError, and ResourceExhaustedError if too many wait."""
        if find_spec("llguidance") is None:
            raise InvalidArgumentError(constraint.field, constraint.value, "none: the package llguidance is missing")
        numbers = _numbers(model)
        key = _name_of(model, numbers), constraint.digest
        answer = self._kept.get(key)
        if answer is None:
            work = partial(self._ask, constraint, model, numbers)
            answer = await self._turns.run(client, constraint.num_characters, work)
            self._keep(key, answer)
        self._kept.move_to_end(key)
        if "grammar" not in answer:
            self._metrics.refused_grammars.inc()
            raise InvalidArgumentError.described(constraint.field, answer["error"])
        return answer["grammar"]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.end()

    def _ask(self, constraint: Constraint, model: ServedModel, numbers: str) -> dict[str, str]:
        key = _name_of(model, numbers)
        if self._process is None or key != self._process_key:
            self.close()
            self._process = BoundedProcess("slipstream.gateway.grammar_compiler", model.tokenizer_path, numbers)
            self._process_key = key
        special = dict(model.limits.special_tokens) if constraint.field == "structural_tag" else {}
        begun_at = time.monotonic()
        request = {"field": constraint.field, "value": constraint.value, "special_tokens": special}
        found = self._process.ask(request)
        if found is None:
            # The process itself was lost, which need not be a fault of the constraint.
            found = self._process.ask(request)
        answer = found or {"error": _TOO_LONG}
        self._metrics.grammar_compile.observe(time.monotonic() - begun_at)
        num_characters = len(answer.get("grammar", ""))
        if num_characters > MAX_GRAMMAR_CHARACTERS:
            return {"error": f"its grammar has {num_characters} characters, at most {MAX_GRAMMAR_CHARACTERS}"}
        return answer

    def _keep(self, key: tuple[str, bytes], answer: dict[str, str]) -> None:
        if key in self._kept:
            return  # another request with it was faster
        self._kept[key] = answer
        self._num_characters += len(str(answer))
        while self._num_characters > MAX_KEPT_CHARACTERS:
            _, oldest = self._kept.popitem(last=False)
            self._num_characters -= len(str(oldest))


def _name_of(model: ServedModel, numbers: str) -> str:
    """Tells tokenizers apart, also those that were in one directory at different times."""
    return f"{model.tokenizer_path} {model.identity} {numbers}"


def _numbers(model: ServedModel) -> str:
    limits = model.limits
    return json.dumps({"vocab_size": limits.vocab_size, "eos_token_ids": sorted(limits.eos_token_ids)})
