"""Triton kernels for CUDA devices. Nothing imports this package where there is none, so triton need not be installed.

A model with these kernels goes, layer by layer:

    attention = PagedAttention(config)                                 # in place of TorchAttention
    attend = attention.prepare(batch, cache)                           # once a forward; `tree=` for trees
    rotation = rotation_of(batch.positions, inverse_frequencies, config.max_position_embeddings)
    ...
    qkv = layer.qkv(normed)                                            # [B * W, q_size + 2 * kv_size]
    mixed = attend.rotate_and_attend(index, qkv, rotation, norms)      # norms, rotation, KV write, attention
"""
