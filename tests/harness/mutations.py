"""Small changes of JSON documents, of safetensors headers and of bytes, drawn from a seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from slipstream.common.errors import CheckpointError

NAN, INFINITY = float("nan"), float("inf")

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**32, 2**40, 2**63, 2**64, -(2**70), 10**30, 10**400),
    *(0.5, -1.5, 1e-320, 1e308, NAN, INFINITY, -INFINITY),
    *("", "x", "llama", "llama3", "linear", "\ud800", "a\nb", "\0", "x" * 10**4),
    *([], [[]], {}, {"": {}}, [None], [1, 2, 3], ["LlamaForCausalLM"], [{}], list(range(1000)), {"rope_type": []}),
    *({"content": None}, {"content": "x", "id": "y"}, {"type": "linear", "factor": "2"}, {"0": {"content": 5}}),
)


class Mutations:
    """Draws small changes of JSON documents and of bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def json(self, document: dict[str, Any]) -> bytes:
        """The text of the document with a few values replaced or left out, or with a few bytes changed."""
        document = json.loads(json.dumps(document))
        for _ in range(self.random.choice((1, 1, 2, 5))):
            self._change(document)
        text = json.dumps(document).encode()
        return self.bytes(text) if self.random.random() < 0.2 else text

    def bytes(self, content: bytes) -> bytes:
        """The bytes with some replaced, doubled or cut off."""
        changed = bytearray(content)
        for _ in range(self.random.randrange(1, 5)):
            place = self.random.randrange(len(changed) + 1)
            match self.random.randrange(4):
                case 0:
                    changed[place : place + 1] = self.random.randbytes(1)
                case 1:
                    del changed[place : place + self.random.choice((1, 8, 10**6))]
                case 2:
                    changed[place:place] = changed[place : place + self.random.randrange(1, 40)]
                case _:
                    changed[place:place] = self.random.choice((b"[", b'{"":', b"9" * 30, b"\xff", b"NaN", b'"\\ud800'))
        return bytes(changed)

    def safetensors(self, content: bytes) -> bytes:
        """A file with a changed header, whose length is right most of the time."""
        (length,) = struct.unpack_from("<Q", content)
        text = self.json(json.loads(content[8 : 8 + length]))
        claimed = len(text) if self.random.random() < 0.9 else self.random.choice((0, 7, len(text) * 2, 2**63, 2**40))
        return struct.pack("<Q", claimed) + text + content[8 + length :]

    def _change(self, document: Any) -> None:
        while True:
            keys = list(document) if isinstance(document, dict) else list(range(len(document)))
            if not keys:
                return
            key = self.random.choice(keys)
            if not isinstance(document[key], (dict, list)) or self.random.random() < 0.3:
                break
            document = document[key]
        if isinstance(document, dict) and self.random.random() < 0.15:
            del document[key]
        else:
            document[key] = deepcopy(self.random.choice(VALUES))


def is_refused(file: Path, read: Callable[[], object], seed: int) -> bool:
    """Changes the file, reads it, and restores it. Returns whether reading raised a CheckpointError, of one line.

    Any other exception fails the test, and is named with the seed.
    """
    original, changed = file.read_bytes(), Mutations(seed)
    is_json = file.suffix == ".json"
    file.write_bytes(changed.json(json.loads(original)) if is_json else changed.safetensors(original))
    try:
        read()
    except CheckpointError as error:
        if str(error).isprintable():
            return True
        raise AssertionError(
            f"{file.name}, changed with seed {seed}: the message has several lines: {error}"
        ) from error
    except BaseException as error:
        raise AssertionError(f"{file.name}, changed with seed {seed}: {error!r}") from error
    finally:
        file.write_bytes(original)
    return False
