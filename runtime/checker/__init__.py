"""What `partc check` proves of an artifact."""
