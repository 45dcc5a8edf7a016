"""Writes a page of HTML that shows an artifact: its facts as JSON, and the scripts that draw them."""
