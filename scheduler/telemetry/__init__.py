"""Measurements of the steps: metrics for Prometheus, and records for `slipstream trace`."""
