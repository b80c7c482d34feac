"""Compiled regions, the count of their graphs, and CUDA graphs around whole calls.

To follow one model through the modules, read in this order:

- ``region``: how a model declares its regions. ``discover``: finds the modules of each region and predicts how many
  graphs they need, with ``signature`` (the properties that a graph is specialised on), ``cut`` (regions for a model
  that declares none), ``observe`` (one eager call) and ``lifted`` (numbers and sizes that are symbols of one graph).
- ``compile``: replaces each region module's call by a ``call.RegionCall``. ``direct``: the backend. It runs a graph of
  library calls and ``kernel.Kernel`` launches as Dynamo traced it, and passes any other graph to Inductor.
- ``graph_log``: records each compiled graph. ``budget``: compares the graphs with the declared budgets.
- ``cuda_graph``: captures a step or a module's calls, by ``graphed_step`` over the buffers of ``captured``.
- ``artifacts``: a folder of compiled regions. ``saved_graph``: one file in it, written from a ``traced`` compilation.
- ``autograd``: gradients of kernels and of directly run graphs. ``compat``: differences between releases of torch.
"""
