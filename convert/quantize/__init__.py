"""FP8: scales from a calibration pass, weights rounded on their way into the checkpoint."""
