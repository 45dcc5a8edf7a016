"""Builds one program per rank from one global order of ops."""
