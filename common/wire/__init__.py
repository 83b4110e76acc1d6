"""Data that crosses a process border, as plain classes, and their messages."""
