"""What the compiler knows of each op: one entry an op, a file a family, a folder a kind. `registry.load` reads every file here."""
