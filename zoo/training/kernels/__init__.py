"""Triton kernels of a training step. Import this only where Triton is installed and a kernel is to run."""
