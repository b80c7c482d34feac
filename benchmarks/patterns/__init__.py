"""The compile-friendly patterns of docs/patterns: before and after, shown there, counted by tests, raced as a family.

A module a pattern, with ``Before``, ``After``, ``inputs`` and a ``PATTERN`` that holds the three together.
"""
