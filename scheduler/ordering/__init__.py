"""The happens-before checker, a debugging tool: replays the logs of a real run."""
