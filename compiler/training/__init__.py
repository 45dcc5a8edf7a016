"""Adds to a model the parts that `train:` in a plan requests: a loss, the backward pass, and the optimizer, all before the model is divided
among ranks.
"""
