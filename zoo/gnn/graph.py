"""A graph as the aggregations want it: edges sorted by destination, with self-loops and normalisation prepared once.

Raw edges are prepared once and remembered, outside of what is compiled.

Shape legend: N nodes, S sources and D destinations of a rectangular graph, E edges.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from zoo.engine.step_buffers import is_step_input
from zoo.ops import common
from zoo.ops.csr import GraphTensors, Split, Transpose, split_rows
from zoo.validate import check_device

_P = ParamSpec("_P")
_R = TypeVar("_R")


def dynamo_disabled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep Dynamo out of a function. ``torch.compiler.disable`` as a decorator would import Dynamo with the zoo."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Recipe(NamedTuple):
    """What is done to a graph before it enters a region; part of a model, equal for all of its layers.

    Args:
        self_loops: Every node has exactly one self-loop. Existing ones are kept, the others added. Of several the last
            one's weight counts, and all of them get its gradient, as in torch-geometric.
        normalize: Weights are those of GCN, ``w_ij / sqrt(d_i d_j)`` with weighted degrees ``d``.
        improved: Added self-loops weigh 2 and not 1, if the graph has weights at all (as torch-geometric does it).
        mean: Inverse degrees are there.
        weighted: Edge weights are used; a graph that has some is refused otherwise.
    """

    self_loops: bool = False
    normalize: bool = False
    improved: bool = False
    mean: bool = False
    weighted: bool = True


class _Structure:
    """Sorted edges without weights. ``origin`` [E] is each edge's place in the input; past its end for an added one.

    Once self-loops were added to edges without any, the edges alone are let go of: the others hold them.
    """

    def __init__(self, source: Tensor, destination: Tensor, origin: Tensor | None, inputs: int, sizes: tuple[int, int]):
        destination, order = torch.sort(destination, stable=True)
        order = order.to(source.dtype)
        source = source.index_select(0, order)
        self._sorted: tuple[Tensor, Tensor, Tensor] | None = (
            source,
            destination,
            order if origin is None else origin.index_select(0, order),
        )
        self.count = source.shape[0]
        self.inputs = inputs
        self.sizes = sizes
        self.rowptr = _pointers(destination, sizes[1])
        self.split = _split(self.rowptr, self.count)
        self.transposed: Transpose | None = None
        self._looped: _Structure | None = None
        # Places in the input of self-loops that another of the same node replaced, and of those others.
        self.passed_over: tuple[Tensor, Tensor] | None = None
        self.unweighted: dict[tuple[Recipe, torch.dtype, bool], GraphTensors] = {}

    @property
    def source(self) -> Tensor:
        return self._all()[0]

    @property
    def destination(self) -> Tensor:
        return self._all()[1]

    @property
    def origin(self) -> Tensor:
        return self._all()[2]

    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Source, destination and origin."""
        edges = self._sorted
        if edges is None:
            assert self._looped is not None
            with torch.inference_mode(False), torch.no_grad():
                source, destination, origin = self._looped._all()
                given = (origin < self.inputs).nonzero().view(-1)
                edges = self._sorted = source[given], destination[given], origin[given]
        return edges

    def looped(self) -> _Structure:
        """The same graph with exactly one self-loop a node, if the node is both a source and a destination."""
        if self._looped is None:
            nodes = min(self.sizes)
            is_loop = self.source == self.destination
            here, elsewhere = is_loop.nonzero().view(-1), (~is_loop).nonzero().view(-1)
            loop = torch.arange(nodes, dtype=self.source.dtype, device=self.source.device)
            # Of several self-loops of a node the last of the input counts, on every device.
            origin = torch.full_like(loop, -1)
            origin.scatter_reduce_(0, self.source[here].long(), self.origin[here], "amax")
            kept = origin[self.source[here]]
            passed_over = (kept != self.origin[here]).nonzero().view(-1)
            self._looped = _Structure(
                torch.cat([self.source[elsewhere], loop]),
                torch.cat([self.destination[elsewhere], loop]),
                torch.cat([self.origin[elsewhere], origin.masked_fill_(origin == -1, self.inputs)]),
                self.inputs,
                self.sizes,
            )
            if passed_over.numel():
                self._looped.passed_over = self.origin[here][passed_over], kept[passed_over]
            if not here.numel():
                self._sorted = None
        return self._looped

    def transpose(self) -> Transpose:
        """Without weights; sorted at first use."""
        if self.transposed is None:
            source, order = torch.sort(self.source, stable=True)
            permutation = order.to(source.dtype)
            colptr = _pointers(source, self.sizes[0])
            destination = self.destination.index_select(0, permutation)
            self.transposed = Transpose(colptr, destination, permutation, None, _split(colptr, self.count))
        return self.transposed

    def to(self, device: torch.device | str) -> _Structure:
        moved = _Structure.__new__(_Structure)
        edges = self._sorted
        moved._sorted = None if edges is None else (edges[0].to(device), edges[1].to(device), edges[2].to(device))
        moved.rowptr = self.rowptr.to(device)
        moved.count, moved.inputs, moved.sizes = self.count, self.inputs, self.sizes
        moved.split = _split(moved.rowptr, moved.count)
        moved.transposed = None
        moved._looped = None if self._looped is None else self._looped.to(device)
        moved.passed_over = None
        if self.passed_over is not None:
            moved.passed_over = self.passed_over[0].to(device), self.passed_over[1].to(device)
        moved.unweighted = {}
        return moved


def _pointers(ascending: Tensor, nodes: int) -> Tensor:
    """[nodes + 1] int64, where the edges of each node start: there may be more than 2^31 edges."""
    return torch.searchsorted(ascending, torch.arange(nodes + 1, dtype=ascending.dtype, device=ascending.device))


def _split(pointers: Tensor, edges: int) -> Split | None:
    return split_rows(pointers, edges) if common.triton_runs_on(pointers.device) else None


class CSRGraph:
    """A graph in compressed sparse rows, one row a destination, built once and used by every layer and every call.

    Build one by ``CSRGraph.from_edge_index``, or by ``model.prepare`` with self-loops and normalisation done. A model
    that is given a graph with another recipe derives what it needs once; derived tensors are remembered by all graphs
    that come from one ``from_edge_index``.

    ``tensors`` is what regions see. Weights that require grad stay part of the autograd graph: they are normalised
    anew at each use, everything else is done once. In-place changes of the ``edge_index`` or of weights without grad
    are not seen: build another graph.
    """

    def __init__(
        self, structure: _Structure, edge_weight: Tensor | None, recipe: Recipe, weight_dtype: torch.dtype
    ) -> None:
        self._structure = structure
        self._edge_weight = edge_weight
        self._differentiable = edge_weight is not None and edge_weight.requires_grad
        self._siblings: dict[tuple[Recipe, torch.dtype, bool], GraphTensors] = {}
        self.recipe = recipe
        self.weight_dtype = weight_dtype
        self.is_square = structure.sizes[0] == structure.sizes[1]
        self._tensors: GraphTensors | None = None
        self._tensors_for_grad: GraphTensors | None = None

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | tuple[int, int] | None = None,
    ) -> CSRGraph:
        """Sort a graph by destination; edges, weights and duplicates stay as they are.

        Args:
            edge_index: [2, E] int64, sources above destinations.
            edge_weight: [E] floating point, or None.
            num_nodes: N, or (S, D) for a rectangular graph; one more than the greatest index when left out.

        Raises:
            TypeError: If something is not a dense tensor of the right dtype.
            ValueError: If a shape or device is wrong, or an index is negative or out of range.
        """
        check_edges(edge_index, edge_weight)
        with torch.inference_mode(False), torch.no_grad():
            # Subclasses of Tensor (torch-geometric's EdgeIndex) carry metadata that the plain tensor does not need.
            plain = edge_index.as_subclass(Tensor)
            sizes = node_counts(plain, num_nodes)
            # Half the bytes to sort, to keep and to read again at every call.
            few = plain.shape[1] + max(sizes) < 2**31
            source, destination = plain.to(torch.int32 if few else torch.int64)
            structure = _Structure(source, destination, None, plain.shape[1], sizes)
        return cls._attach(structure, edge_weight)

    @classmethod
    def _attach(cls, structure: _Structure, edge_weight: Tensor | None) -> CSRGraph:
        if edge_weight is not None and not edge_weight.requires_grad:
            with torch.inference_mode(False):
                edge_weight = edge_weight.clone()
        dtype = torch.float64 if edge_weight is not None and edge_weight.dtype == torch.float64 else torch.float32
        # Most graphs are never used without what a recipe adds, and would hold both.
        return cls(structure, edge_weight, Recipe(), dtype)

    def with_weights(self, edge_weight: Tensor | None) -> CSRGraph:
        """The graph without self-loops or normalisation and with other weights, [E] in the order of the input."""
        if edge_weight is not None:
            check_edge_weight(edge_weight, self._structure.inputs, self.device)
        return self._attach(self._structure, edge_weight)

    def prepared(self, recipe: Recipe, weight_dtype: torch.dtype = torch.float32) -> CSRGraph:
        """The graph that a recipe asks for, always derived from the edges as they were given."""
        if recipe == self.recipe and weight_dtype == self.weight_dtype:
            return self._ready()
        if self._edge_weight is not None and not recipe.weighted:
            raise ValueError("the graph carries edge weights, which this layer does not use; build it without them")
        if recipe.normalize and not self.is_square:
            raise ValueError(
                f"normalisation needs a square graph, this one has {self.num_sources} sources and "
                f"{self.num_destinations} destinations; use normalize=False, or GraphSAGE or GAT"
            )
        derived = CSRGraph(self._structure, self._edge_weight, recipe, weight_dtype)
        derived._siblings = self._siblings
        return derived._ready()

    def with_self_loops(self, *, improved: bool = False) -> CSRGraph:
        """The graph with exactly one self-loop a node; see ``Recipe``."""
        return self.prepared(Recipe(self_loops=True, improved=improved), self.weight_dtype)

    def gcn_normalized(self, *, add_self_loops: bool = True, improved: bool = False) -> CSRGraph:
        """The graph with the symmetric normalisation of GCN as weights; see ``Recipe``."""
        return self.prepared(Recipe(self_loops=add_self_loops, normalize=True, improved=improved), self.weight_dtype)

    @property
    def tensors(self) -> GraphTensors:
        """What a region is given: with the transpose if gradients are enabled."""
        if self._tensors is None and not self._differentiable and not torch.compiler.is_compiling():
            self._fill()
        if not torch.is_grad_enabled():
            return self._tensors if self._tensors is not None else self._build(False)
        if self._edges.transposed is None or (self._tensors is not None and self._tensors_for_grad is None):
            self._add_transpose()
        return self._tensors_for_grad if self._tensors_for_grad is not None else self._build(True)

    def _ready(self) -> CSRGraph:
        """Whoever prepares a graph with gradients enabled will train on it."""
        if self._tensors is None:
            self._fill()
        if torch.is_grad_enabled():
            self._add_transpose()
        return self

    @dynamo_disabled
    def _add_transpose(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._edges.transpose()
            if not self._differentiable:
                self._tensors_for_grad = self._remembered(True)

    def _fill(self) -> CSRGraph:
        with torch.inference_mode(False), torch.no_grad():
            # Also where only the weights are left to do: adding self-loops reads sizes from the device.
            _ = self._edges
            if not self._differentiable:
                self._tensors = self._remembered(False)
        return self

    def _remembered(self, transpose: bool) -> GraphTensors:
        # Without weights all graphs of one structure share; with weights, all that have the same.
        known = self._structure.unweighted if self._edge_weight is None else self._siblings
        key = self.recipe, self.weight_dtype, transpose
        if key not in known:
            known[key] = self._build(transpose)
        return known[key]

    def _build(self, transpose: bool) -> GraphTensors:
        edges = self._edges
        if transpose and self._tensors is not None:
            return self._tensors._replace(transpose=_weighted(edges.transpose(), self._tensors.weight))
        weight = None
        if self._edge_weight is not None:
            wide = self._edge_weight.to(torch.promote_types(self._edge_weight.dtype, self.weight_dtype))
            if self._differentiable and edges.passed_over is not None:
                # Adds nothing, but passes the gradient on, as torch-geometric's does.
                lost, kept = edges.passed_over
                wide = wide.index_add(0, kept, (wide - wide.detach()).index_select(0, lost))
            added = wide.new_full((1,), 2.0 if self.recipe.improved else 1.0)
            weight = torch.cat([wide, added]).index_select(0, edges.origin)
        if self.recipe.normalize:
            weight = _normalized(edges, weight, self.weight_dtype)
        inverse_degree = None
        if self.recipe.mean:
            inverse_degree = edges.rowptr.diff().clamp(min=1).to(self.weight_dtype).reciprocal()
        weight = None if weight is None else weight.to(self.weight_dtype)
        return GraphTensors(
            edges.rowptr,
            edges.source,
            edges.destination,
            weight,
            inverse_degree,
            edges.split,
            _weighted(edges.transpose(), weight) if transpose else None,
        )

    @property
    def _edges(self) -> _Structure:
        return self._structure.looped() if self.recipe.self_loops else self._structure

    @property
    def transpose(self) -> Transpose:
        """The edges sorted by source; built at first use."""
        with torch.inference_mode(False), torch.no_grad():
            return self._edges.transpose()

    @property
    def num_sources(self) -> int:
        """S."""
        return self._structure.sizes[0]

    @property
    def num_destinations(self) -> int:
        """D."""
        return self._structure.sizes[1]

    @property
    def num_edges(self) -> int:
        """Edges after self-loops were added."""
        return self._edges.count

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._structure.rowptr.device

    def to(self, device: torch.device | str) -> CSRGraph:
        """The graph on another device; this one stays."""
        check_device(device, "a graph")
        with torch.inference_mode(False):
            weight = None if self._edge_weight is None else self._edge_weight.to(device)
            structure = self._structure.to(device)
        moved = CSRGraph(structure, weight, self.recipe, self.weight_dtype)
        return moved if self._tensors is None and not self._differentiable else moved._fill()

    def __repr__(self) -> str:
        nodes = self.num_sources if self.is_square else self._structure.sizes
        weighted = ", weighted" if self._edge_weight is not None else ""
        done = "".join(f", {word}" for word in ("self_loops", "normalize", "mean") if getattr(self.recipe, word))
        return f"CSRGraph(nodes={nodes}, edges={self.num_edges}{weighted}{done}, device={self.device})"


def _weighted(transpose: Transpose, weight: Tensor | None) -> Transpose:
    """With the weights, given in CSR order."""
    return transpose if weight is None else transpose._replace(weight=weight.index_select(0, transpose.permutation))


def _normalized(edges: _Structure, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w_ij / sqrt(d_i d_j) [E], in at least ``dtype``; a degree of zero gives zero and no gradient."""
    if weight is None:
        degree = edges.rowptr.diff().to(dtype)
    else:
        degree = weight.new_zeros(edges.sizes[1]).index_add(0, edges.destination, weight)
    isolated = degree == 0
    scale = degree.masked_fill(isolated, 1.0).pow(-0.5).masked_fill(isolated, 0.0)
    both = scale.index_select(0, edges.source) * scale.index_select(0, edges.destination)
    return both if weight is None else both * weight


def weight_dtype(x: Tensor) -> torch.dtype:
    """Weights stay in float32 beside half-precision features: sums over many edges are kept in it anyway."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Seen:
    """A tensor as it was: the same object, unchanged since."""

    def __init__(self, tensor: Tensor, on_death: Callable[[Any], None] | None = None) -> None:
        self._reference = weakref.ref(tensor, on_death)
        self._stamp = _stamp(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        return self._reference() is tensor and self._stamp is not None and self._stamp == _stamp(tensor)


def _stamp(tensor: Tensor) -> tuple[Any, ...] | None:
    """Changes with every in-place operation that torch counts, which it does not through ``.data`` or NumPy.

    Inference tensors keep no count, so nothing is known of them.
    """
    if tensor.is_inference():
        return None
    return tensor._version, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class _Entry:
    def __init__(self, edges: _Seen, num_nodes: tuple[int, int], plain: CSRGraph) -> None:
        self.edges = edges
        self.num_nodes = num_nodes
        self.plain = plain
        # Read and written as one: another thread may call with other weights.
        self.weighted: tuple[_Seen, CSRGraph] | None = None


class GraphMemory:
    """Graphs prepared from raw ``edge_index`` tensors, by identity and version of the tensors.

    The last ``size`` graphs are kept, each until its ``edge_index`` dies. A copy or a pickle of the model starts with
    an empty memory.
    """

    def __init__(self, size: int = 8) -> None:
        self._size = size
        self._entries: dict[int, _Entry] = {}
        self._captured: list[CSRGraph] = []

    def keep(self, graph: CSRGraph) -> None:
        """Hold a graph that went into a CUDA graph as long as the model lives: replays read its memory."""
        self._captured.append(graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphMemory:
        return GraphMemory(self._size)

    def __reduce__(self) -> tuple[type[GraphMemory], tuple[int]]:
        return GraphMemory, (self._size,)

    def __len__(self) -> int:
        return len(self._entries)

    def graph(
        self,
        edge_index: Tensor | CSRGraph,
        edge_weight: Tensor | None,
        num_nodes: tuple[int, int],
        recipe: Recipe,
        dtype: torch.dtype,
    ) -> CSRGraph:
        """The prepared graph of raw edges or of any CSRGraph.

        Raises:
            TypeError, ValueError: As ``CSRGraph.from_edge_index``; if weights come twice, or are of no use.
        """
        if isinstance(edge_index, CSRGraph):
            if edge_weight is not None:
                raise ValueError(
                    "edge_weight was given beside a CSRGraph; put it into the graph: graph.with_weights(edge_weight)"
                )
            return edge_index.prepared(recipe, dtype)
        check_edges(edge_index, edge_weight)
        if edge_weight is not None and not recipe.weighted:
            raise ValueError("edge_weight was given, but this layer does not use edge weights; leave it out")
        entry = self._entries.pop(id(edge_index), None)
        if entry is None or entry.num_nodes != num_nodes or not entry.edges.is_still(edge_index):
            entry = _Entry(
                _Seen(edge_index, functools.partial(_forget, self._entries, id(edge_index))),
                num_nodes,
                CSRGraph.from_edge_index(edge_index, None, num_nodes),
            )
        self._entries[id(edge_index)] = entry
        if len(self._entries) > self._size:
            del self._entries[next(iter(self._entries))]
        if edge_weight is None:
            return entry.plain.prepared(recipe, dtype)
        if edge_weight.requires_grad or is_step_input(edge_weight):
            # Anew at each call: of what is learned for its gradient, and of an input of a captured step because every
            # replay brings other values.
            return entry.plain.with_weights(edge_weight).prepared(recipe, dtype)
        weighted = entry.weighted
        if weighted is None or not weighted[0].is_still(edge_weight):
            weighted = entry.weighted = _Seen(edge_weight), entry.plain.with_weights(edge_weight)
        return weighted[1].prepared(recipe, dtype)


def _forget(entries: dict[int, _Entry], key: int, _: Any) -> None:
    entries.pop(key, None)


def check_features(x: Tensor, channels: int, weight: Tensor, what: str = "x") -> None:
    """Features that the weights can be applied to. Reads no value, so it never synchronises."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        found = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{what} is a {found}, expected a dense tensor [N, {channels}] of features")
    if x.dim() != 2 or x.shape[1] != channels:
        raise ValueError(f"{what} has shape {tuple(x.shape)}, expected [N, {channels}]: a row of {channels} a node")
    if x.device != weight.device:
        raise ValueError(f"{what} is on {x.device} and the weights are on {weight.device}; move one of them")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{what} is {x.dtype}, expected {weight.dtype}; use {what}.to({weight.dtype})")
    if x.dtype != weight.dtype:
        if torch.float64 in (x.dtype, weight.dtype):
            # Autocast leaves it as it is.
            raise TypeError(f"{what} is {x.dtype} and the weights are {weight.dtype}; use {what}.to({weight.dtype})")
        if not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{what} is {x.dtype} and the weights are {weight.dtype}; use {what}.to({weight.dtype}), or "
                "torch.autocast"
            )


def check_nodes(x: Tensor, count: int, device: torch.device, what: str = "x") -> None:
    """One row of features for each node of the graph, beside it."""
    if x.shape[0] != count:
        raise ValueError(
            f"{what} has {x.shape[0]} rows and the graph has {count} nodes; prepare the graph with "
            f"num_nodes={x.shape[0]}"
        )
    if x.device != device:
        raise ValueError(f"{what} is on {x.device} and the graph on {device}; move one of them, graph.to({x.device})")


def check_edges(edge_index: Tensor, edge_weight: Tensor | None) -> None:
    """Kinds and shapes of a raw graph, checked without reading a value."""
    if not isinstance(edge_index, Tensor):
        if isinstance(edge_index, list) and any(isinstance(each, GraphTensors) for each in edge_index):
            raise TypeError(
                "edge_index is a list of GraphTensors, as torch's DataLoader makes of a batch's graphs; pass "
                "tuple(batch.graphs), or move the batch by batch.to(device), which makes them a tuple again"
            )
        raise TypeError(
            f"edge_index is a {type(edge_index).__name__}, expected an int64 tensor [2, E] or a CSRGraph; build one "
            "with CSRGraph.from_edge_index"
        )
    if edge_index.layout != torch.strided:
        raise TypeError(f"edge_index is {edge_index.layout}, expected a dense int64 tensor [2, E] or a CSRGraph")
    if edge_index.dtype != torch.int64:
        raise TypeError(f"edge_index is {edge_index.dtype}, expected torch.int64; use edge_index.long()")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        hint = "; transpose it with .t()" if edge_index.dim() == 2 and edge_index.shape[1] == 2 else ""
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}, expected [2, E]{hint}")
    if edge_weight is not None:
        check_edge_weight(edge_weight, edge_index.shape[1], edge_index.device)


def check_edge_weight(edge_weight: Tensor, edges: int, device: torch.device) -> None:
    """One real factor an edge."""
    if not isinstance(edge_weight, Tensor) or edge_weight.layout != torch.strided:
        raise TypeError(f"edge_weight is a {type(edge_weight).__name__}, expected a dense tensor [E] of floats")
    if not edge_weight.dtype.is_floating_point:
        raise TypeError(f"edge_weight is {edge_weight.dtype}, expected floating point; use edge_weight.float()")
    if tuple(edge_weight.shape) != (edges,):
        raise ValueError(
            f"edge_weight has shape {tuple(edge_weight.shape)} and there are {edges} edges, expected one weight an "
            f"edge, ({edges},)"
        )
    if edge_weight.device != device:
        raise ValueError(f"edge_weight is on {edge_weight.device} and the edges on {device}; move one of them")


def node_counts(edge_index: Tensor, num_nodes: int | tuple[int, int] | None) -> tuple[int, int]:
    """(S, D), with every index checked. Reads two numbers from the device."""
    least, greatest = [-1, -1], [-1, -1]
    if edge_index.shape[1]:
        low, high = edge_index.aminmax(dim=1)
        (least, greatest) = torch.stack([low, high]).tolist()
    given = num_nodes
    if num_nodes is None:
        num_nodes = max(*greatest, -1) + 1
    if isinstance(num_nodes, int):
        num_nodes = (num_nodes, num_nodes)
    if not isinstance(num_nodes, tuple) or len(num_nodes) != 2 or not all(_is_count(n) for n in num_nodes):
        raise ValueError(f"num_nodes is {given!r}, expected a count, or (sources, destinations)")
    if edge_index.shape[1]:
        for row, what in enumerate(("source", "destination")):
            if least[row] < 0:
                raise ValueError(f"edge_index holds the negative {what} {least[row]}; nodes are numbered from 0")
            if greatest[row] >= num_nodes[row]:
                raise ValueError(
                    f"edge_index holds {what} {greatest[row]}, but there are {num_nodes[row]} nodes (0 to "
                    f"{num_nodes[row] - 1}); give features for every node, or drop the edge"
                )
    return num_nodes


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
