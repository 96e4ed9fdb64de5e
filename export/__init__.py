"""Export of a drafter or a model in the format of another runtime."""
