"""Whether a worker can be attached as a scheduler asks it to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.common.device.manifest import DTYPES
from slipstream.common.errors import ConfigError, MismatchError, StaleEpochError
from slipstream.common.worker.contract import PROTOCOL_VERSION
from slipstream.common.worker.step import Role

if TYPE_CHECKING:
    from slipstream.common.worker.contract import Attachment, WorkerDescription
    from slipstream.common.worker.layout import FutureMapShape


def check_attachment(attachment: Attachment, own: WorkerDescription, last_epoch: int) -> None:
    """`own`: what the worker is; `last_epoch`: the largest that it was attached in.

    Raises MismatchError, StaleEpochError, ConfigError.
    """
    if attachment.protocol_version != PROTOCOL_VERSION:
        given = attachment.protocol_version
        raise MismatchError([f"protocol version: scheduler has {given}, this worker has {PROTOCOL_VERSION}"])
    if attachment.epoch <= last_epoch:
        raise StaleEpochError(f"epoch {attachment.epoch}: this worker was attached to {last_epoch} before")
    if attachment.peer is not None:
        own.check_fits(attachment.peer)
    if own.role is Role.DRAFT and not attachment.shape.num_draft_tokens:
        raise ConfigError("attach.num_draft_tokens", 0, "at least 1, for a draft")
    _check_hidden(attachment.shape, own)
    longest = own.max_context_tokens
    if attachment.context_tokens > longest:
        given = attachment.context_tokens
        raise MismatchError([f"context: scheduler has {given} tokens, this model was made for {longest}"])


def _check_hidden(shape: FutureMapShape, own: WorkerDescription) -> None:
    width = shape.hidden_width
    if own.role is Role.DRAFT and width != own.hidden_width:
        raise MismatchError([f"width of the hidden states: arena has {width}, draft reads {own.hidden_width}"])
    if width and shape.hidden_dtype is not DTYPES.get(own.dtype):
        raise MismatchError([f"dtype of the hidden states: arena has {shape.hidden_dtype}, model has {own.dtype}"])
