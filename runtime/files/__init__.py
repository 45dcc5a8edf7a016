"""Opening, replacing and locking files: regular ones alone, whole or not at all."""
