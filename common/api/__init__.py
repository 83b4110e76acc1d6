"""The clients' requests and answers as plain data: output chunks, jobs, usage, sampling."""
