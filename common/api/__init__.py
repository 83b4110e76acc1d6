"""Data that clients send and get, as plain classes, and the interface between gateway and core."""
