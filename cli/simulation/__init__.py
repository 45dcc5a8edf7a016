"""Simulates a step of an artifact from its files: `partc simulate` with a machine."""
