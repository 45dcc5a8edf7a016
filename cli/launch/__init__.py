"""Starts a job under a launcher: the command line, the supervision of its ranks, its folders and their cleanup."""
