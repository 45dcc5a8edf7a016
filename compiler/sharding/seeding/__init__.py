"""The shardings that the plan and the model declare for nodes, regions, parameters and inputs; all others are derived from them."""
