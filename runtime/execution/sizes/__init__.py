"""Step plans by sizes."""
