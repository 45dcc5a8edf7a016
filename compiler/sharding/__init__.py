"""The sharding of each node on its group: declared by the plan or the model, or derived from the declared ones."""
