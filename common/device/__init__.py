"""Streams, fences and arenas of one device, by one interface: `cpu/` and `cuda/`."""
