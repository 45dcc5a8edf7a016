"""The output of commands: text or JSON, tables, progress, statistics of an artifact."""
