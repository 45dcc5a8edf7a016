"""Reads and writes checkpoints of other libraries: PyTorch files with optimizer state, safetensors files and folders of models."""
