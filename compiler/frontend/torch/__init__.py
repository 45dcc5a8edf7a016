"""Modules of torch, and files that torch exports: names and weights of modules, and what takes no gradient."""
