"""Streams, fences and arenas of one device, behind one interface: `cpu/` and `cuda/`."""
