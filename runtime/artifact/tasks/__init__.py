"""Tasks of a rank file: how they are written, their calls in a row, the memory that a row saves, the number of its microbatches."""
