"""Triton kernels over compressed sparse rows. Import this only where Triton is installed and a kernel is to run.

A program reduces ``ROWS`` rows. It walks their edges ``EDGES`` at a time: that many rows of features are on their way
from memory at once, which is what hides its latency. Sums are kept in float32, an edge slot each, and the slots are
added up at the end. There are no atomics: the same input gives the same bits.

Long rows are cut into chunks (see split.py). The first programs of a launch take chunks and leave partial results,
the others take whole rows and skip the long ones; a second kernel then adds up the chunks of each long row in order.

Offsets are 64 bits wide; indices are int32 or int64.

Shape legend: R rows, S gathered nodes, E edges, X chunks, L long rows, H heads, C channels.
"""
