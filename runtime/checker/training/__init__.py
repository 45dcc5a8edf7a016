"""The promises of training: state, copies, updates in place, microbatches."""
