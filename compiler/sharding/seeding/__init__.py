"""The shardings that the plan and the model give: of nodes, regions, parameters and inputs, from which the others are derived."""
