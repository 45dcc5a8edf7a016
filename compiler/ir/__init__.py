"""The program that passes take and give."""
