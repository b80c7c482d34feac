"""Regions and capture: what a model declares, how its regions are compiled and counted, and the outer CUDA graph."""
