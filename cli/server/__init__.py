"""The HTTP server of completions: requests checked, queued for the ranks, and answered as tokens come."""
