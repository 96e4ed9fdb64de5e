"""The TensorRT-LLM backend's build: a checked `trtllm-build` command, run here or written down."""
