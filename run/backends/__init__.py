"""TensorRT-LLM's runtimes, as specdec-run calls them."""
