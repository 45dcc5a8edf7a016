"""Parameters' updates over flat memory."""
