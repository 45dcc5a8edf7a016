"""The devices of a rank's targets, and the memory of devices."""
