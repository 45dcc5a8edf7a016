"""The checks of `partc doctor`: a file for each kind of cause."""
