"""Regions and capture: what a model declares, how its regions are compiled and counted, and the outer CUDA graph.

To follow one model through it, read in this order:

- ``region``: what a model declares. ``discover``: which modules that names and how many graphs they need, with
  ``signature`` (what makes two calls need two graphs), ``cut`` (where a model is cut that declares nothing),
  ``observe`` (what one eager call shows) and ``lifted`` (numbers and sizes that are symbols of one graph).
- ``compile``: puts a ``call.RegionCall`` in the place of each module's call. ``direct``: the backend. It runs a graph
  of library calls and of ``kernel.Kernel`` launches as it was traced, and leaves any other to Inductor.
- ``graph_log``: which graphs were compiled. ``budget``: holds them to what was declared.
- ``cuda_graph``: captures a step or a module's calls, by ``graphed_step`` over the buffers of ``captured``.
- ``artifacts``: a folder of compiled regions, each a ``saved_graph`` of what was ``traced``.
- ``autograd``: gradients that have none of their own. ``compat``: what only some releases of torch have.
"""
