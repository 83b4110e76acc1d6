"""The frame of a gRPC service: addresses, serving, health, statuses, logs and metrics."""
