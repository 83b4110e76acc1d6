"""A GPU as a device: CUDA streams, IPC memory, and fences on streams."""
