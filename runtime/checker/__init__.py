"""The proofs of `partc check` about an artifact."""
