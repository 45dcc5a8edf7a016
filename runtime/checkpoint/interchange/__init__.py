"""Checkpoints of other libraries, read and written: files of PyTorch with the state of its optimizers, safetensors, folders of models."""
