"""Modules of torch, and files that torch exports: names and weights of modules, and values that no gradient flows through."""
