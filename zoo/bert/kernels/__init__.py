"""Triton kernels of a layer that learns. Import this only where Triton is installed and a kernel is to run."""
