"""Sums of two ranks on two GPUs; a module of its own, as each rank's process imports it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slipstream.services.models.config import Rank
from slipstream.services.models.cuda_ranks import CudaRanks


def check_sums(number: int, path: str) -> None:
    """Runs on each of two ranks."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    ranks = CudaRanks(Rank(number, 2), dist.FileStore(path, 2), device)
    assert ranks._shared is not None, "symmetric memory can be used"
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for num_rows in (1, 5, 64, 300, 2048):
            parts = [
                torch.randn(num_rows, 1024, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1)
            ]
            expected, part = (parts[0] + parts[1]).to(device), parts[number].to(device)
            ways = [ranks.sum, ranks._by_nccl]
            ways += [] if dtype == torch.float16 else [ranks._one_shot, ranks._two_shot]
            for way in ways:
                way(part)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                total = way(part)
                graph.capture_end()
                for _ in range(3):
                    total.zero_()
                    graph.replay()
                assert torch.equal(total, expected), (way, dtype, num_rows)
    halves = torch.arange(12.0).view(3, 4).split(2, dim=1)
    assert torch.equal(ranks.joined(halves[number].to(device)).cpu(), torch.arange(12.0).view(3, 4))
    values = torch.full((5,), number, device=device)
    ranks.broadcast(values)
    assert not values.any()
    torch.cuda.synchronize(device)
    dist.destroy_process_group()
