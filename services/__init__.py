"""The draft and verify services: `worker/` is what both share, `models/` what they compute with."""
