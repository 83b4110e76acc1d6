"""The step loop and what it decides with: sequences, batch, pages, slots, the ordering plan."""
