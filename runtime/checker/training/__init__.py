"""Checks of a training: state, copies, updates in place, microbatches."""
