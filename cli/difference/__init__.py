"""What differs between two artifacts."""
