"""Kernels are compiled once for the engines that a module builds in process."""

from tests.kernels import compiled_once, kernel_folder

__all__ = ["compiled_once", "kernel_folder"]
