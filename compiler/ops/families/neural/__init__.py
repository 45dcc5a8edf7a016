"""Families of ops of neural networks: attention, normalization, dropout, losses, recurrent layers."""
