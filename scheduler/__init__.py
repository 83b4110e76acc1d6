"""The scheduler process: `main.py` is its command line, `server.py` puts it together."""
