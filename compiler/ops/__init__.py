"""What partc knows of each op: rules of sharding, local forms, gradients; one file a family."""
