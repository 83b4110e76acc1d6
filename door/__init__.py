"""OpenAI's interface over HTTP, as a client of the gateway."""
