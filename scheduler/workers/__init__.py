"""The scheduler's side of the draft and verify services: epochs, links, sizes, heartbeats."""
