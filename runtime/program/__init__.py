"""Makes a rank file executable: its steps, sessions and memory."""
