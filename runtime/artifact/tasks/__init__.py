"""Tasks of a rank file: how they are written, their calls in a row, what a row keeps, how many microbatches it runs."""
