"""A target of any supported kind as heads are distilled from it: what its layers and its output say of a text."""

from pathlib import Path

import torch
from torch import Tensor

from slipstream.services.models.attention import ForwardBatch
from slipstream.services.models.checkpoint import LoadFormat, load_decoder
from slipstream.services.models.decoder import Decoder
from slipstream.services.models.paged_kv import PagedKV

PAGE_TOKENS = 64
ROWS_AT_ONCE = 1024
"""Positions whose logits over the whole vocabulary are in memory at a time."""


class Teacher:
    """A decoder that serves elsewhere, in float32 on a CPU and in bfloat16 on a GPU. It is not trained."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        fused_layers: tuple[int, ...] = (),
        load_format: LoadFormat = LoadFormat.AUTO,
    ) -> None:
        """Raises `CheckpointError` for what is no target."""
        decoder_class, self.dtype = Decoder, torch.float32
        if device.type == "cuda":
            from slipstream.services.models.kernels.fused import FusedDecoder  # which needs Triton

            decoder_class, self.dtype = FusedDecoder, torch.bfloat16
        self.decoder = load_decoder(
            folder,
            device=device,
            dtype=self.dtype,
            load_format=load_format,
            decoder_class=decoder_class,
        )
        self.config, self.device = self.decoder.config, device
        self.fused_layers = fused_layers or default_layers(self.config.num_layers)
        self._cache: PagedKV | None = None

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size], as a head reads it."""
        return self.decoder.embedding.data

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """The output's rows of some tokens: [n, hidden_size] float32."""
        return self.decoder.head.plain_weight.detach()[token_ids.to(self.device)].float()

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the fused layers side by side, and the final norm's output, for int64 [batch, length].

        [batch, length, layers * hidden_size] and [batch, length, hidden_size], in the decoder's dtype.
        """
        (batch, length), device = tokens.shape, self.device
        pages_of_row = -(-length // PAGE_TOKENS)
        num_pages = 1 + batch * pages_of_row
        if self._cache is None or self._cache.num_pages < num_pages:
            self._cache = PagedKV(
                self.config, num_pages=num_pages, page_size=PAGE_TOKENS, device=device, dtype=self.dtype
            )
        rows = ForwardBatch(
            tokens=tokens,
            positions=torch.arange(length, device=device).expand(batch, length).contiguous(),
            is_valid=torch.ones_like(tokens, dtype=torch.bool),
            page_table=torch.arange(1, num_pages, device=device).view(batch, pages_of_row),
            limits=torch.full((batch,), length, device=device),
            max_kv_len=length,
        )
        output = self.decoder(rows, self._cache, aux_layers=self.fused_layers)
        return output.aux.clone(), output.hidden.clone()  # out of inference mode: a head's weights learn by them

    def log_probabilities(self, hidden: Tensor, temperature: float, token_ids: Tensor) -> Tensor:
        """Log probabilities of some tokens among all: [..., hidden_size] to [..., n] float32."""
        parts = []
        for part in torch.split(hidden.flatten(0, -2), ROWS_AT_ONCE):
            logits = self.decoder.logits(part).float() / temperature
            parts.append(logits[:, token_ids] - logits.logsumexp(-1, keepdim=True))
        return torch.cat(parts).view(*hidden.shape[:-1], -1).clone()


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are fused: the paper's, or in small models thirds."""
    few = (num_layers // 3, 2 * num_layers // 3, num_layers)
    return few if num_layers < 8 else (2, num_layers // 2, num_layers - 3)
