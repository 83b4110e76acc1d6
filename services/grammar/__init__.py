"""The grammar worker: masks of the tokens that a constraint allows."""
