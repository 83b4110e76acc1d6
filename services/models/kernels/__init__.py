"""Triton kernels for CUDA devices. Nothing imports what is in here where there is none, so triton need not be there.

`fused_decoder.py` shows how they go together, layer by layer:

    attention = PagedAttention(config)                                 # in place of TorchAttention
    attend = attention.prepare(batch, cache)                           # once a forward; `tree=` for trees
    rotation = rotation_of(batch.positions, inverse_frequencies, config.max_position_embeddings)
    ...
    qkv = layer.qkv(normed)                                            # [B * W, q_size + 2 * kv_size]
    mixed = attend.rotate_and_attend(index, qkv, rotation, norms)      # norms, rotation, KV write, attention
    x, normed = add_rms_norm(x, layer.output(mixed), weight, eps)
    delta = layer.down(swiglu(layer.gate_up(normed)))
    ...
    tokens = sample(logits, rows, positions, has_filters=False)        # of logits in any dtype

Files named `*_kernels.py` hold what runs on the device, the others what launches it. On a GPU of compute capability 9
or more a kernel is launched while the one before it ends, and waits for it by itself (`launching.py`). What is launched
depends on shapes alone, and nothing is read back, so that all of it can be captured in CUDA graphs. The first launch
of a kernel compiles it, which takes seconds: run each shape once before serving.

Measured on an H200 with the shapes of an 8B model: matrix products by cuBLAS read weights at 88 % of the copy bandwidth
for 5 tokens; fetching the next product's weights into the cache during the small kernels made a forward slower (0 to
8 %), as cuBLAS's kernels prefetch by themselves. torch.compile makes norms and SwiGLU as fast as these and not faster.
"""
