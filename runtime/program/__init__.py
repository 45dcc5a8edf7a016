"""A rank file made executable: segments, sessions, memory."""
