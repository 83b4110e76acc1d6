"""The checks of `slipstream doctor`."""
