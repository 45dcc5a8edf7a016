"""Token generation: requests, the slots in which they run, and the loop of steps."""
