"""Rows of tables on several ranks: fetched from their owners, and their gradients sent there."""
