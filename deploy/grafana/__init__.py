"""The Grafana dashboards, as code and as the JSON made from it."""
