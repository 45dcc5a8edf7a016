"""Rows of tables that lie on several ranks: fetched from their owners, and what is given to them brought there."""
