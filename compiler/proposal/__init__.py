"""A plan that partc proposes for what it recognizes of a model: cuts, stages, and the reasons."""
