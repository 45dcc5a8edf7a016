"""The compiler's knowledge of each op: one entry for each op, a file for each family, a folder for each kind. `registry.load` reads
every file here.
"""
