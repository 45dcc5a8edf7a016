"""What a `model.py` calls to say how it is distributed: `Input`, `place`, `shard`, and the record of these calls."""
