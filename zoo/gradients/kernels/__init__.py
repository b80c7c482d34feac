"""Triton kernels of gradients. Import this only where Triton is installed and a kernel is to run."""
