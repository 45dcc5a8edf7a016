"""The functions by which a `model.py` declares its distribution: `Input`, `place`, `shard`, and the record of these calls."""
