"""What `partc doctor` looks at: a file for each kind of cause."""
