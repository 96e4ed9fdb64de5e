"""Convert, build and run in one command; what was built is kept for the next time."""
