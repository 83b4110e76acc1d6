"""Triton kernels for CUDA devices. Without a CUDA device nothing here is imported, so triton need not be installed.

`fused.py` shows how they go together, layer by layer. Functions with `@triton.jit` run on the device, the others launch
them. On a GPU of compute capability 9 or more a kernel is launched while the one before it ends, and waits for it by
itself (`launching.py`). What is launched depends only on shapes, and nothing is read back, so that all of it can be
captured in CUDA graphs. The first launch of a kernel compiles it, which takes seconds: run each shape once before
serving.

Up to 64 rows, products are `product` and `add_product` (`products.py`), which leave no kernel between them but
attention. With more, cuBLAS has them; but where tiles of one size fill a Hopper GPU, as in a step of 2,048 tokens, the
gated product and the sums are tiled, which takes less of the power that limits such a step. With 80 to 128 rows the
gated product is, too: one row of tiles reads the weight once.

Attention of ragged rows, which are those of steps with prompts, reads blocks of 64 keys by the GPU's copy engine where
a page has whole ones; elsewhere, and in steps that only decode, each key by its page.

Tried on an H200 with the shapes of an 8B model, 5 tokens a row: a forward takes less than with cuBLAS's products, a
little for one row and more for eight. It takes less, too, when a kernel lets the one after it be launched before it
waits for the one ahead. Asking for a whole weight during attention gains nothing, as attention's tiles leave no room
for the product's programs. Tiles that leave a norm half done, as the products of few rows do, take more power than the
norm's kernel. A loop without a mask for the blocks that all queries see gains nothing. torch.compile makes norms and
SwiGLU as fast as these and not faster.
"""
