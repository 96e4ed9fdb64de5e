"""The ranks of a tensor-parallel engine: their processes, rank 0's decoder, its followers."""
