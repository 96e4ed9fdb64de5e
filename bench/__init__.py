"""specdec-bench, specdec tune and specdec diagnose: what speculation brings on this machine."""
