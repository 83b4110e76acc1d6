"""The contract between the scheduler and its workers: steps, attachments, shared buffers, records."""
