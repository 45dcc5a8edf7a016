"""Data for training: where records come from, in which order, and what each rank reads of a batch."""
