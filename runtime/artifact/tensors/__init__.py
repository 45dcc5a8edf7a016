"""Tensors: element types, boxes, bytes in memory and in files, numbers drawn by law."""
