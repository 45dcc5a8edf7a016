"""The texts of the `training` section of a manifest: data, learning rates, metrics, files and code that it names."""
