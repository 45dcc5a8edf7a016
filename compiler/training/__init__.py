"""What `train:` in a plan adds to a model: a loss, the backward pass, and the optimizer, all before the ranks are cut apart."""
