"""The commands of `partc`, a file each."""
