"""The side that clients meet: requests, jobs and their text. It knows no slot, no page and no device."""
