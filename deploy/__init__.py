"""Containers, Prometheus and Grafana, and the scripts that make their files."""
