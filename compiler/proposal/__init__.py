"""A plan that partc proposes from the structure of a model: shardings, stages, and the reasons."""
