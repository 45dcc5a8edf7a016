"""Loads an artifact and runs it: segments of a rank's program as onnxruntime sessions, messages over a transport."""
