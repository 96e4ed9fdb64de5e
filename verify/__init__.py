"""specdec-verify: proofs that what the other stages wrote is what it claims to be."""
