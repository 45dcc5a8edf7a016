"""The compiler's knowledge of each op: rules of sharding, local forms, gradients; one file for each family."""
