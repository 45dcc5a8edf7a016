"""Making tokens: requests, the slots in which they run, and the loop of steps."""
