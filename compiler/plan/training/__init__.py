"""The `train:` of a plan: losses, metrics, optimizers and their options, under their usual names, and the rules built from them."""
