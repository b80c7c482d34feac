"""Triton kernels of the family. Import this only where Triton is installed and a kernel is to run."""
