"""`slipstream up` and what it is made of: its settings, the services' commands and processes, their supervisor, MPS."""
