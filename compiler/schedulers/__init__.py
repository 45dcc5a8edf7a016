"""Schedules made: the named ones, a search for any stages, costs and limits, and the one that a plan asks for."""
