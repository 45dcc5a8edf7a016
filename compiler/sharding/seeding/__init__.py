"""What the plan and the model give: shardings of nodes, regions, parameters and inputs, from which the others are derived."""
