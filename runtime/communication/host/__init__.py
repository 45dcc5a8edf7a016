"""The data plane of the ranks of one host: what they send and reduce goes through memory that they share."""
