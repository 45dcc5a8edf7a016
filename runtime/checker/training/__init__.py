"""What training promises: state, copies, updates in place, parts of a batch."""
