"""TensorRT-LLM as data: what each line of it knows, and what of it is on this machine.

Nothing here imports TensorRT-LLM; the backends of build and run do, and only when they run it.
"""
