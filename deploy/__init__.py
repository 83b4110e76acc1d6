"""What runs beside the services: Prometheus, Grafana, and the scripts that make their files."""
