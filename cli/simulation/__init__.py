"""A step of an artifact, played from its files: `partc simulate` with a machine."""
