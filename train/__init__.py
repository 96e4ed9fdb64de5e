"""Training of drafters, and the data for it."""
