"""Records that are read by indices and are not fields in files: objects of the user's, arrow tables, shards of samples."""
