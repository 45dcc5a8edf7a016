"""The memory of a step: the bytes that actions use, the proof that no two values overlap, and filling of freed memory."""
