"""The forward, backward and update parts of a step, on every rank."""
