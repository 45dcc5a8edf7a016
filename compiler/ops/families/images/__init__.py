"""Families of ops on images: convolution, pooling, resizing."""
