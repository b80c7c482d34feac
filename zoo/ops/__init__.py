"""Operators of our own: each a function with its torch reference, and a Triton kernel that the compiler sees."""
