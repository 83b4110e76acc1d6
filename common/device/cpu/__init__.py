"""The CPU as a device: threads as streams, a file in /dev/shm as the arena, futexes as fences."""
