"""specdec-train data: the training data with the target's own answers."""
