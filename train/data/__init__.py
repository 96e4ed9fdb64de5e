"""`specdec-train data`: training data with the target's own answers."""
