"""The contents of the `training` section of a manifest: data, learning rates, metrics, and the files and code that it names."""
