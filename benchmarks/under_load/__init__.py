"""What benchmarks/serve.py measures: servers under load, costs, memory, texts."""
