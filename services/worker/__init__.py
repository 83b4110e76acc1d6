"""The frame of a worker: server, engine, slots, staging, the FutureMap, graphs."""
