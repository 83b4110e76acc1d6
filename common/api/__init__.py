"""What clients send and get, as plain data: output chunks, jobs, usage, sampling."""
