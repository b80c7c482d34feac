"""Triton kernels of a decode step. Import this only where Triton is installed and a kernel is to run.

A step of few rows reads every weight once and does little else, so that a kernel is as good as the bytes that it keeps
on their way, and the gaps between kernels cost as much as the smaller products themselves. Each kernel therefore takes
in what stands before and behind its product: the norm, the activation, the residual add.
"""
