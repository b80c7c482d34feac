"""Triton kernels and their launches. Imported when one is first needed: the zoo itself imports no Triton."""
