"""Parts of EAGLE: the networks in training, and their first weights."""
