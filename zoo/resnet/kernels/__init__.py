"""Triton kernels of the glue. Import this only where Triton is installed and a kernel is to run.

Rows [R, C] are cut into tiles; a program has the channels of one tile and goes through one tile of rows or several. It
reads what belongs to its channels once. What pools has columns of an image instead, and goes down its lines. Sizes are
no part of the code: one compilation serves all stages.
"""
