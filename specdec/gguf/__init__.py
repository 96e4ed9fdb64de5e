"""Models in GGUF, llama.cpp's format: read as if they were Hugging Face folders."""
