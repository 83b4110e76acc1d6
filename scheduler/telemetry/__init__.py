"""What the scheduler measures of its steps, and who may read it."""
