"""The `slipstream` command, and the supervisor that runs the services on this machine."""
