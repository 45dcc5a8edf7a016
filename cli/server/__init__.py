"""The HTTP server of completions: it checks requests, queues them for the ranks, and answers as tokens arrive."""
