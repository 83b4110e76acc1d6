"""Decoders, heads and samplers in PyTorch, and their Triton kernels in `kernels/`."""
