"""A search of plans: candidates of degrees, microbatches and shardings, estimated by the cost model, with a lower bound of all of them."""
