"""The input of a forward, and causal attention over keys and values in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import nn

    from slipstream.services.models.config import ModelConfig
    from slipstream.services.models.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """B rows of different lengths, one after the other: N tokens. The tensors are on the model's device."""

    lengths: tuple[int, ...] | None
    """Tokens of each row, at least one; None in a graph: a row may be empty then, and padding may follow the last."""
    rows: torch.Tensor
    """[N] int64: the row of each token."""
    begins: torch.Tensor
    """[B + 1] int64: the place of each row's first token, and where the last row ends, which is N without padding."""
    num_keys: tuple[int, ...] | None = None
    """Keys that each row's last token sees at most, where the host knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """B rows of query tokens: of W tokens each, or ragged, N tokens together.

    All tensors are on the model's device and may be static buffers. Positions and pages may hold anything: whatever
    lies outside a row's limit or page table is written to the padding page and never read, so that running ahead of a
    request's end is harmless.
    """

    tokens: torch.Tensor
    """[B, W] or [N] int64 token ids."""
    positions: torch.Tensor
    """[B, W] or [N] int64 absolute positions of the tokens."""
    is_valid: torch.Tensor
    """[B, W] or [N] bool: False for padding queries, whose outputs mean nothing and whose KV is dropped."""
    page_table: torch.Tensor
    """[B, P] int64 page numbers: the KV of position p is in page `page_table[b, p // page_size]`."""
    limits: torch.Tensor
    """[B] int64: positions from here on are not kept; their queries see only the positions before it."""
    starts: torch.Tensor | None = None
    """[B] int64: the first position that has a key; those before it are neither read nor seen. None: 0 for all rows.

    A query before its row's first position gets numbers that mean nothing.
    """
    max_kv_len: int | None = None
    """Bounds the positions that any valid query sees, where the host knows it; None: the whole page table."""
    last_seen: torch.Tensor | None = None
    """[B, W] int64: the last position that each query sees, its own or a later one; None: its own. Not if ragged."""
    ragged: RaggedRows | None = None
    """The rows of N tokens; None for W tokens in each."""
    outputs: torch.Tensor | None = None
    """[M] int64: the tokens whose outputs are read, any of them more than once; None: all, in order. -1 is padding.

    For all other tokens, which are most of a prompt, the last layer computes keys and values only.
    """

    def one_token_rows(self, places: torch.Tensor) -> ForwardBatch:
        """Takes some tokens of a ragged batch, [M] int64, as rows of one token; -1 for one that is not valid."""
        assert self.ragged is not None, "rows of W tokens are read together"
        is_there, places = places[:, None] >= 0, places.clamp_min(0)
        rows = self.ragged.rows.index_select(0, places)
        return ForwardBatch(
            tokens=self.tokens.index_select(0, places)[:, None],
            positions=self.positions.index_select(0, places)[:, None],
            is_valid=self.is_valid.index_select(0, places)[:, None] & is_there,
            page_table=self.page_table.index_select(0, rows),
            limits=self.limits.index_select(0, rows),
            starts=None if self.starts is None else self.starts.index_select(0, rows),
        )

    def by_row(self) -> list[ForwardBatch]:
        """Takes a ragged batch apart: each row that has tokens by itself, [1, W]."""
        assert self.ragged is not None, "rows of W tokens are computed together"
        assert self.last_seen is None, "queries of a prompt see no later tokens"
        by_token, lengths = (self.tokens, self.positions, self.is_valid), _lengths(self.ragged)
        parts = zip(*(torch.split(values, lengths) for values in by_token), strict=True)
        return [
            replace(
                self,
                tokens=tokens[None],
                positions=positions[None],
                is_valid=is_valid[None],
                page_table=self.page_table[row : row + 1],
                limits=self.limits[row : row + 1],
                starts=None if self.starts is None else self.starts[row : row + 1],
                max_kv_len=None if self.max_kv_len is None else int(positions.max()) + 1,
                ragged=None,
                outputs=None,
            )
            for row, (tokens, positions, is_valid) in enumerate(parts)
            if lengths[row]
        ]


@dataclass(frozen=True, slots=True)
class JoinedBatch:
    """Batches of one forward, one after the other: each has attention of its own, all share the products."""

    parts: tuple[ForwardBatch, ...]
    tokens: torch.Tensor
    """[N] int64: those of all parts."""
    positions: torch.Tensor
    """[N] int64."""
    outputs: torch.Tensor | None
    """[M] int64: see `ForwardBatch`; those of all parts."""

    @classmethod
    def of(cls, *parts: ForwardBatch) -> JoinedBatch:
        """Joins parts whose rows are different sequences."""
        tokens = torch.cat([part.tokens.flatten() for part in parts])
        positions, outputs = torch.cat([part.positions.flatten() for part in parts]), None
        if any(part.outputs is not None for part in parts):
            places = torch.arange(len(tokens), device=tokens.device)
            pairs = zip(parts, torch.split(places, [part.tokens.numel() for part in parts]), strict=True)
            outputs = torch.cat(
                [own if part.outputs is None else own[part.outputs.clamp_min(0)] for part, own in pairs]
            )
        return cls(parts, tokens, positions, outputs)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each part."""
        return [part.tokens.numel() for part in self.parts]


def _lengths(ragged: RaggedRows) -> list[int]:
    """Tokens of each row, where the host can read them; padding counts for the last row."""
    if ragged.lengths is not None:
        return list(ragged.lengths)
    lengths: list[int] = ragged.begins.diff().tolist()
    lengths[-1] += len(ragged.rows) - sum(lengths)
    return lengths


class LastOutputs:
    """Selects the tokens of which a layer's output is read: all, but in the last layer only a batch's `outputs`."""

    def __init__(self, config: ModelConfig, outputs: torch.Tensor | None) -> None:
        """`outputs`: see `ForwardBatch`."""
        self._last = config.num_layers - 1
        self._outputs = None if outputs is None else outputs.clamp_min(0)

    def are_all(self, layer: int) -> bool:
        """Returns whether the output of every token is read, in order."""
        return self._outputs is None or layer != self._last

    def are_none(self, layer: int) -> bool:
        """Returns whether no output is read: the layer has to make keys and values only."""
        return layer == self._last and self._outputs is not None and not len(self._outputs)

    def of(self, layer: int, values: torch.Tensor) -> torch.Tensor:
        """Selects from a layer's values of all tokens: [N, size] to [M, size]."""
        return values if self._outputs is None or layer != self._last else values.index_select(0, self._outputs)


Rotating = TypeVar("Rotating", contravariant=True)


class Norm(Protocol):
    """A norm of heads, as kernels read it too."""

    weight: nn.Parameter
    eps: float

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Attention(Protocol[Rotating]):
    """Attention of one forward, called once for each layer."""

    outputs: LastOutputs

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: Rotating,
        norms: tuple[Norm, Norm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, keeps keys and values, and attends to all that each query sees.

        `qkv`: [N, q_size + 2 * kv_size], which may be overwritten. `norms`: of each head's queries and keys. `sinks`:
        [num_heads] float32, a score of each head that has no value. Returns [N, q_size], or of the last layer what is
        read of it.
        """


class Keeping(Protocol[Rotating]):
    """The part of attention that precedes the scores: norms, rotation, and the pages of keys and values."""

    def keep(self, layer: int, qkv: torch.Tensor, rotation: Rotating, norms: tuple[Norm, Norm] | None = None) -> object:
        """Norms and rotates queries and keys, and keeps keys and values; arguments as in `Attention`."""


class Rotation:
    """The rotation of one forward's tokens, the same for all layers."""

    def __init__(self, table: torch.Tensor, positions: torch.Tensor) -> None:
        """`table`: of `rotation_table`. `positions`: [N] int64."""
        frequencies, factors = table
        angles = positions[:, None].to(torch.float32) * frequencies
        sine = (angles.sin() * factors)[:, None, None]
        self._cosine = (angles.cos() * factors)[:, None, None]
        self._signed_sine = torch.cat((-sine, sine), dim=2)

    def apply_(self, heads: torch.Tensor) -> None:
        """Rotates [N, heads, head_dim] in place."""
        halves = heads.view(*heads.shape[:2], 2, heads.shape[2] // 2)
        swapped = halves.flip(2)
        halves.mul_(self._cosine).addcmul_(swapped, self._signed_sine)


class TorchAttention:
    """Attention of one forward in PyTorch, called once for each layer; for CPUs, and as the reference."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch | JoinedBatch, cache: PagedKV) -> None:
        self.outputs = LastOutputs(config, batch.outputs)
        parts = batch.parts if isinstance(batch, JoinedBatch) else (batch,)
        rows = [row for part in parts for row in ((part,) if part.ragged is None else part.by_row())]
        self._sizes = [row.tokens.numel() for row in rows]
        self._rows = [_RowsAttention(config, row, cache) for row in rows]
        self._num_heads, self._head_dim = [config.num_heads, config.num_kv_heads], config.head_dim

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: Rotation | None = None,
        norms: tuple[Norm, Norm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Attention`. `rotation`: None for queries and keys that are rotated already."""
        parts = self.keep(layer, qkv, rotation, norms)
        if self.outputs.are_none(layer):
            return qkv[:0]
        attended = [rows.attend(layer, of_rows, sinks) for rows, of_rows in parts]
        return self.outputs.of(layer, attended[0] if len(attended) == 1 else torch.cat(attended))

    def keep(
        self, layer: int, qkv: torch.Tensor, rotation: Rotation | None, norms: tuple[Norm, Norm] | None = None
    ) -> list[tuple[_RowsAttention, torch.Tensor]]:
        """See `Keeping`. Returns the rows, each with its part of `qkv`."""
        if rotation is not None:
            self._rotate(qkv, rotation, norms)
        parts = list(zip(self._rows, torch.split(qkv, self._sizes), strict=True))
        for rows, of_rows in parts:
            rows.keep(layer, of_rows)
        return parts

    def _rotate(self, qkv: torch.Tensor, rotation: Rotation, norms: tuple[Norm, Norm] | None) -> None:
        num_heads = sum(self._num_heads)
        heads = qkv[:, : num_heads * self._head_dim].view(len(qkv), num_heads, self._head_dim)
        if norms is not None:
            for part, norm in zip(torch.split(heads, self._num_heads, dim=1), norms, strict=True):
                part.copy_(norm(part))
        rotation.apply_(heads)


class ContextAttention(Generic[Rotating]):
    """Attention of a block, which first keeps keys and values of the block's context.

    Both are rows of one product, the context's C rows before the block's, and each has its rotation.
    """

    def __init__(self, context: Keeping[Rotating], block: Attention[Rotating], num_context: int) -> None:
        """`num_context`: C."""
        self.outputs = block.outputs
        self._context, self._block, self._num_context = context, block, num_context

    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor,
        rotation: tuple[Rotating, Rotating],
        norms: tuple[Norm, Norm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Attention`. `rotation`: the context's and the block's. Returns the block's rows."""
        self._context.keep(layer, qkv[: self._num_context], rotation[0], norms)
        return self._block(layer, qkv[self._num_context :], rotation[1], norms, sinks)


class _RowsAttention:
    """Attention of B rows of W tokens: gathers each row's pages and calls PyTorch's.

    Everything that indexes is clamped. A key that a row must not see is replaced by the row's own first
    visible one before the mask hides it: not even a NaN in another request's pages reaches a valid query.

    The mask is added to the scores, and minus infinity hides finite scores only. So keys that are not finite become
    zeros first, and the outputs of the queries that see them NaN. A query or key whose squared norm overflows counts
    as not finite: below it, no score overflows.
    """

    def __init__(self, config: ModelConfig, batch: ForwardBatch, cache: PagedKV) -> None:
        """Computes where keys and values go, which ones each row gathers, and a mask for each size of window."""
        page_size = cache.page_size
        capacity = batch.page_table.shape[1] * page_size
        num_keys = capacity if batch.max_kv_len is None else min(capacity, max(1, batch.max_kv_len))
        offsets = torch.arange(capacity, device=batch.tokens.device)
        first_rows = batch.page_table.clamp(0, cache.num_pages - 1) * page_size
        table = (first_rows[:, :, None] + offsets[:page_size]).flatten(1)  # [B, capacity]: row of each position

        ends = batch.limits.clamp(0, capacity)[:, None]
        is_kept = batch.is_valid & (batch.positions >= 0) & (batch.positions < ends)
        indices = batch.positions.clamp(0, capacity - 1)
        self._write_rows = torch.where(is_kept, table.gather(1, indices), indices % page_size).flatten()

        last_seen = batch.positions if batch.last_seen is None else batch.last_seen
        last_seen = torch.minimum(last_seen, ends - 1).clamp_min_(0)
        row_last = torch.where(batch.is_valid, last_seen, 0).amax(dim=1, keepdim=True)
        if batch.max_kv_len is not None:
            assert bool((row_last < num_keys).all()), f"a query sees past max_kv_len = {batch.max_kv_len}"
        keys = offsets[:num_keys]
        is_read, first_row = keys <= row_last, table[:, :1]
        if batch.starts is not None:
            row_first = torch.minimum(batch.starts.clamp_min(0)[:, None], row_last)
            is_read, first_row = is_read & (keys >= row_first), table.gather(1, row_first)
        self._read_rows = torch.where(is_read, table[:, :num_keys], first_row).flatten()

        # The queries of all heads that share a key head are stacked, so that it is read once.
        (num_rows, width), group = batch.tokens.shape, config.num_heads // config.num_kv_heads
        self._query_shape = (num_rows, width, config.num_kv_heads, group, config.head_dim)
        self._stacked_shape = (num_rows, config.num_kv_heads, group * width, config.head_dim)
        self._split_shape = (num_rows, config.num_kv_heads, group, width, config.head_dim)
        self._kv_shape = (num_rows, num_keys, 2, config.num_kv_heads, config.head_dim)
        self._q_size, self._window_of, self._cache = config.q_size, config.sliding_window, cache
        self._score_scale, self._score_cap = config.score_scale, config.score_cap
        last_seen = last_seen.clamp_max(num_keys - 1)[..., None]  # so that a window leaves padding queries a key, too
        self._masks = {
            window: _mask(keys, last_seen, window, batch.starts, cache.dtype).repeat(1, group, 1)[:, None]
            for window in set(config.sliding_windows) or {None}
        }
        # One buffer for all layers: fresh memory of this size costs a CPU as much as filling it.
        self._gathered = self._read_rows.new_empty(self._read_rows.numel(), 2 * config.kv_size, dtype=cache.dtype)

    def keep(self, layer: int, qkv: torch.Tensor) -> None:
        """Keeps keys and values."""
        self._cache.keep(layer, self._write_rows, qkv[:, self._q_size :])

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attends to keys that are kept: [B * W, q_size + 2 * kv_size] to [B * W, q_size]. `sinks`: see `Attention`."""
        self._cache.gather(layer, self._read_rows, self._gathered)
        kv = self._gathered.view(self._kv_shape).permute(2, 0, 3, 1, 4)
        query = qkv[:, : self._q_size].view(self._query_shape).permute(0, 2, 3, 1, 4).reshape(self._stacked_shape)
        mask = self._masks[self._window_of(layer)]
        is_broken = None if self._is_finite(query) else self._zero_broken_keys()
        output = self._attended(query, kv[0], kv[1], mask, sinks)
        if is_broken is not None:
            # Float products count the broken keys that each query sees: [B, 1, group * W, kv_heads].
            num_seen = (mask == 0).float() @ is_broken.float()[:, None]
            output = output.masked_fill((num_seen > 0).transpose(1, 3), torch.nan)
            output = output.masked_fill(~_has_finite_norm(query)[..., None], torch.nan)
        return output.view(self._split_shape).permute(0, 3, 1, 2, 4).reshape(len(qkv), self._q_size)

    def _attended(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        cap = self._score_cap
        if cap is None and sinks is None:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self._score_scale)
        scores = (query @ keys.transpose(2, 3)).float()
        scores = (
            scores.mul_(self._score_scale) if cap is None else scores.mul_(self._score_scale / cap).tanh_().mul_(cap)
        )
        scores = scores.add_(mask)
        if sinks is not None:
            _, _, kv_heads, group, _ = self._query_shape
            by_query = sinks.view(kv_heads, group).repeat_interleave(scores.shape[2] // group, 1)
            scores = torch.cat((scores, by_query[None, ..., None].expand(len(scores), -1, -1, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values

    def _is_finite(self, query: torch.Tensor) -> bool:
        """Returns True only if all squared norms are finite. Elsewhere than on a CPU it is not known without waiting.

        By a dot product, which is one fast pass: the sum of all squares overflows if the sum of some does.
        """
        return query.is_cpu and all(
            math.isfinite(torch.dot(values, values).item()) for values in (self._gathered.view(-1), query.flatten())
        )

    def _zero_broken_keys(self) -> torch.Tensor:
        """Zeroes gathered keys that are not finite, or whose values are not. Returns which: [B, num_keys, kv_heads]."""
        kv = self._gathered.view(self._kv_shape)
        is_broken = ~(_has_finite_norm(kv[:, :, 0]) & kv[:, :, 1].isfinite().all(dim=-1))
        kv.masked_fill_(is_broken[:, :, None, :, None], 0.0)
        return is_broken


def _has_finite_norm(vectors: torch.Tensor) -> torch.Tensor:
    """Returns whether the squared norm of each vector is finite: [..., size] to [...]."""
    return vectors.float().square().sum(dim=-1).isfinite()


def _mask(
    keys: torch.Tensor, last_seen: torch.Tensor, window: int | None, starts: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The mask that is added to the scores: [B, W, num_keys]."""
    is_hidden = keys > last_seen
    if starts is not None:
        is_hidden |= keys < torch.minimum(starts[:, None, None], last_seen)
    if window is not None:
        is_hidden |= keys <= last_seen - window
    return torch.zeros(1, dtype=dtype, device=keys.device).masked_fill(is_hidden, float("-inf"))
