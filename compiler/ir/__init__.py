"""The program: the data that passes receive and return."""
