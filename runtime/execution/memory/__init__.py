"""The memory of a step: which actions use which bytes, the proof that no two values meet, and filling what is free."""
