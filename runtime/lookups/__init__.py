"""Rows of tables that are sharded over several ranks: fetched from their owners, and their gradients sent to them."""
