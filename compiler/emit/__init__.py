"""The files of an artifact."""
