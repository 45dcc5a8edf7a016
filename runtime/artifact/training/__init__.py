"""What the `training` section of a manifest says in texts: data, learning rates, metrics, files and code it names."""
