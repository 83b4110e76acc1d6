"""What clients meet: requests, jobs and their text. Knows neither a slot nor a page, and no device."""
