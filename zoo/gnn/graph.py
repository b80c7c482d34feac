"""Prepared graphs: edges sorted by destination, with self-loops and normalisation done once.

They are built outside compiled code. ``GraphMemory`` caches the graphs that were prepared from raw edges.

Shape legend: N nodes, S sources and D destinations of a rectangular graph, E edges, C channels.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zoo import validate
from zoo.engine.captured import is_captured, is_step_input
from zoo.ops import common
from zoo.ops.common import accumulation_dtype
from zoo.ops.csr import GraphTensors, Split, Transpose, split_rows

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Number of graphs, prepared from raw edges, that a model caches.
REMEMBERED = 8


def dynamo_disabled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep Dynamo out of a function. The decorator ``torch.compiler.disable`` would import Dynamo with the zoo."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class Recipe(NamedTuple):
    """How a model prepares its graph, once for all layers."""

    self_loops: bool = False  # exactly one per node; of several the last one's weight counts
    normalize: bool = False  # GCN's weights, w_ij / sqrt(d_i d_j) with weighted degrees d
    improved: bool = False  # added self-loops weigh 2 if the graph has weights, as in torch-geometric
    mean: bool = False  # compute inverse degrees
    weighted: bool = True  # use edge weights; if False, a graph with weights is refused


class _Structure:
    """A graph without weights, shared by graphs that differ in weights and recipe, and tensors derived from it.

    Edges [E] are sorted by destination. ``origin`` is each edge's place in the input, or past its end if added.
    """

    def __init__(self, edges: Sequence[Tensor], inputs: int, sizes: tuple[int, int]) -> None:
        order = torch.sort(edges[1], stable=True).indices
        self.source, self.destination, self.origin = (each.index_select(0, order) for each in edges)
        self.count, self.inputs, self.sizes = len(order), inputs, sizes
        self.rowptr = _pointers(self.destination, sizes[1])
        self.split = _split(self.rowptr, self.count)
        self.transposed: Transpose | None = None

    @functools.cached_property
    def looped(self) -> _Structure:
        """The same graph with exactly one self-loop per node that is both a source and a destination."""
        edges, is_loop = (self.source, self.destination, self.origin), self.source == self.destination
        loops, others = is_loop.nonzero().view(-1), (~is_loop).nonzero().view(-1)
        nodes = torch.arange(min(self.sizes), dtype=self.source.dtype, device=self.source.device)
        # If a node has several self-loops, the last in the input counts, on every device.
        origin = torch.full_like(nodes, -1)
        origin.scatter_reduce_(0, self.source[loops].long(), self.origin[loops], "amax")
        added = nodes, nodes, origin.masked_fill(origin == -1, self.inputs)
        both = [torch.cat([each[others], new]) for each, new in zip(edges, added, strict=True)]
        return _Structure(both, self.inputs, self.sizes)

    def transpose(self) -> Transpose:
        """The transpose without weights, sorted at first use."""
        if self.transposed is None:
            source, order = torch.sort(self.source, stable=True)
            permutation = order.to(source.dtype)
            colptr = _pointers(source, self.sizes[0])
            destination = self.destination.index_select(0, permutation)
            self.transposed = Transpose(colptr, destination, permutation, None, _split(colptr, self.count))
        return self.transposed

    def to(self, device: torch.device | str) -> _Structure:
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (Tensor, _Structure)):
                setattr(moved, name, value.to(device))
        moved.split, moved.transposed = _split(moved.rowptr, self.count), None
        return moved


def _pointers(ascending: Tensor, nodes: int) -> Tensor:
    """Start of each node's edges: [nodes + 1] int64, since there may be more than 2^31 edges."""
    return torch.searchsorted(ascending, torch.arange(nodes + 1, dtype=ascending.dtype, device=ascending.device))


def _split(pointers: Tensor, edges: int) -> Split | None:
    return split_rows(pointers, edges) if common.triton_runs_on(pointers.device) else None


class CSRGraph:
    """A graph in compressed sparse rows, one row per destination, built once and used by every layer and every call.

    Build it with ``CSRGraph.from_edge_index``, or with ``model.prepare`` including self-loops and normalisation. A
    graph for another model's recipe is derived once and cached.

    Regions see ``tensors``. Weights that require grad are normalised at each use. In-place changes of ``edge_index`` or
    of weights without grad have no effect: build another graph.
    """

    def __init__(
        self, structure: _Structure, edge_weight: Tensor | None, recipe: Recipe, weight_dtype: torch.dtype
    ) -> None:
        self._structure, self._edge_weight = structure, edge_weight
        self._differentiable = edge_weight is not None and edge_weight.requires_grad
        self.recipe, self.weight_dtype = recipe, weight_dtype
        self.num_sources, self.num_destinations = structure.sizes
        self.is_square = self.num_sources == self.num_destinations
        self._ready: dict[bool, GraphTensors] = {}  # False: without the transpose, True: with it
        self._others: dict[tuple[Recipe, torch.dtype], CSRGraph] = {}  # derived graphs for other recipes

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, edge_weight: Tensor | None = None, num_nodes: int | tuple[int, int] | None = None
    ) -> CSRGraph:
        """Sort a graph by destination; edges, weights and duplicates are kept.

        Takes ``edge_index`` [2, E] int64, with sources in the first row, ``edge_weight`` [E] floating point or None,
        and the number of nodes N, or (S, D) for a rectangular graph; by default one more than the maximum index.
        TypeError or ValueError if a dtype, shape or device is wrong, or an index is out of range.
        """
        check_edges(edge_index)
        with torch.inference_mode(False), torch.no_grad():
            edge_index = edge_index.as_subclass(Tensor)  # it may be torch-geometric's EdgeIndex
            sizes, count = _node_counts(edge_index, num_nodes), edge_index.shape[1]
            # int32 halves the bytes to sort, to store and to read in every call.
            dtype = torch.int32 if count + max(sizes) < 2**31 else torch.int64
            source, destination = edge_index.to(dtype)
            origin = torch.arange(count, dtype=dtype, device=edge_index.device)
            structure = _Structure((source, destination, origin), count, sizes)
        graph = cls(structure, None, Recipe(), torch.float32)
        return graph if edge_weight is None else graph.with_weights(edge_weight)

    def with_weights(self, edge_weight: Tensor) -> CSRGraph:
        """The graph without self-loops or normalisation and with other weights, [E] in the order of the input."""
        options: dict[str, Any] = {"like": self.device, "like_name": "the edges", "hint": ", one weight per edge"}
        validate.tensor("edge_weight", edge_weight, f"{self._structure.inputs}", kinds="floating", **options)
        if not edge_weight.requires_grad:
            with torch.inference_mode(False):
                edge_weight = edge_weight.clone()
        return CSRGraph(self._structure, edge_weight, Recipe(), accumulation_dtype(edge_weight.dtype))

    def prepared(self, recipe: Recipe, weight_dtype: torch.dtype = torch.float32) -> CSRGraph:
        """The graph of a recipe, always derived from the original edges."""
        key = recipe, weight_dtype
        graph = self if key == (self.recipe, self.weight_dtype) else self._others.get(key)
        if graph is None:
            if self._edge_weight is not None and not recipe.weighted:
                raise ValueError("the graph carries edge weights, which this layer does not use; build it without them")
            if recipe.normalize and not self.is_square:
                raise ValueError("normalisation needs a square graph; use normalize=False, or GraphSAGE or GAT")
            graph = self._others[key] = CSRGraph(self._structure, self._edge_weight, recipe, weight_dtype)
        graph._prepare()
        return graph

    @property
    def tensors(self) -> GraphTensors:
        """The inputs of a region, with the transpose if gradients are enabled."""
        learn = torch.is_grad_enabled()
        if self._differentiable:
            if learn and self._edges.transposed is None:
                self._prepare()
            return self._build(learn)
        if learn not in self._ready:
            self._prepare()
        return self._ready[learn]

    @dynamo_disabled
    def _prepare(self) -> None:
        """Build all constant tensors, including the transpose if gradients are enabled."""
        learn = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            # Adding self-loops reads sizes from the device, so it is done here even if each use normalises weights.
            edges = self._edges
            if learn:
                edges.transpose()
            for transpose in () if self._differentiable else (False, True)[: 1 + learn]:
                if transpose not in self._ready:
                    self._ready[transpose] = self._build(transpose)

    def _build(self, transpose: bool) -> GraphTensors:
        structure = self._edges
        if transpose and False in self._ready:
            plain = self._ready[False]
            return plain._replace(transpose=_weighted(structure.transpose(), plain.weight))
        weight = None
        if self._edge_weight is not None:
            given = self._edge_weight.to(torch.promote_types(self._edge_weight.dtype, self.weight_dtype))
            added = given.new_full((1,), 2.0 if self.recipe.improved else 1.0)
            weight = torch.cat([given, added]).index_select(0, structure.origin)
        if self.recipe.normalize:
            weight = _normalized(structure, weight, self.weight_dtype)
        inverse_degree = None
        if self.recipe.mean:
            inverse_degree = structure.rowptr.diff().clamp(min=1).to(self.weight_dtype).reciprocal()
        weight = None if weight is None else weight.to(self.weight_dtype)
        return GraphTensors(
            rowptr=structure.rowptr, source=structure.source, destination=structure.destination, weight=weight,
            inverse_degree=inverse_degree, split=structure.split,
            transpose=_weighted(structure.transpose(), weight) if transpose else None,
        )  # fmt: skip

    @property
    def _edges(self) -> _Structure:
        return self._structure.looped if self.recipe.self_loops else self._structure

    def __repr__(self) -> str:
        nodes = f"{self.num_sources}" if self.is_square else f"{self.num_sources} to {self.num_destinations}"
        return f"CSRGraph({nodes} nodes, {self.num_edges} edges, {self.recipe}, on {self.device})"

    @property
    def num_edges(self) -> int:
        """Number of edges, including added self-loops."""
        return self._edges.count

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._structure.rowptr.device

    def to(self, device: torch.device | str) -> CSRGraph:
        """The graph on another device; this one stays."""
        validate.check_device(device, "a graph")
        with torch.inference_mode(False):
            weight = None if self._edge_weight is None else self._edge_weight.to(device)
            structure = self._structure.to(device)
        moved = CSRGraph(structure, weight, self.recipe, self.weight_dtype)
        if self._ready:
            with torch.no_grad():
                moved._prepare()
        return moved


def _weighted(transpose: Transpose, weight: Tensor | None) -> Transpose:
    """The transpose with weights, given in CSR order."""
    return transpose if weight is None else transpose._replace(weight=weight.index_select(0, transpose.permutation))


def _normalized(structure: _Structure, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w_ij / sqrt(d_i d_j) [E], in at least ``dtype``; a degree of zero gives zero and no gradient."""
    source, destination = structure.source, structure.destination
    if weight is None:
        degree = structure.rowptr.diff().to(dtype)
    else:
        degree = weight.new_zeros(structure.sizes[1]).index_add(0, destination, weight)
    isolated = degree == 0
    scale = degree.masked_fill(isolated, 1.0).pow(-0.5).masked_fill(isolated, 0.0)
    both = scale.index_select(0, source) * scale.index_select(0, destination)
    return both if weight is None else both * weight


def _version_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """A counter of the in-place operations on a tensor; None for inference tensors, which have no counter."""
    if tensor.is_inference():
        return None
    return tensor._version, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class GraphMemory:
    """A cache of graphs prepared from raw edges, keyed by identity and version of the tensors.

    It holds the last ``REMEMBERED`` graphs whose tensors are alive. Copies and pickles of the model start empty.
    """

    def __init__(self) -> None:
        # From edges to their version and number of nodes, and the graph. The oldest is first.
        self._entries = WeakIdKeyDictionary()
        self._captured: list[CSRGraph] = []

    def __reduce__(self) -> tuple[type[GraphMemory], tuple[()]]:
        return GraphMemory, ()

    @dynamo_disabled
    def prepare(
        self, graph: CSRGraph | Tensor, edge_weight: Tensor | None, x: Tensor, recipe: Recipe,
        destinations: int | None = None,
    ) -> CSRGraph:  # fmt: skip
        """Prepare raw edges or any CSRGraph by ``recipe``, for features x [S, C]; by default S destinations."""
        dtype = accumulation_dtype(x.dtype)
        if isinstance(graph, CSRGraph):
            if edge_weight is not None:
                raise ValueError("edge_weight was given with a CSRGraph; use graph.with_weights(edge_weight)")
            return graph.prepared(recipe, dtype)
        check_edges(graph, x)
        if is_step_input(graph):
            raise ValueError(
                "edge_index is an input of zoo.cuda_graph, which would bake in the graph prepared from its first "
                "value; pass model.prepare(edge_index, num_nodes=N) and name it in static="
            )
        if edge_weight is not None and not recipe.weighted:
            raise ValueError("edge_weight was given, but this layer does not use edge weights; leave it out")
        prepared = self._remembered(graph, (x.shape[0], x.shape[0] if destinations is None else destinations))
        if edge_weight is not None:
            prepared = prepared.with_weights(edge_weight)
        prepared = prepared.prepared(recipe, dtype)
        if is_captured(prepared.device):
            # Replays of the CUDA graph read this graph's memory as long as the model lives.
            self._captured.append(prepared)
        return prepared

    def _remembered(self, edge_index: Tensor, num_nodes: tuple[int, int]) -> CSRGraph:
        version = _version_of(edge_index)
        *seen, graph = self._entries.pop(edge_index, (None, None, None))
        if version is None or graph is None or seen != [version, num_nodes]:
            graph = CSRGraph.from_edge_index(edge_index, None, num_nodes)
        self._entries[edge_index] = version, num_nodes, graph
        if len(self._entries) > REMEMBERED:
            del self._entries[next(iter(self._entries))]
        return graph


def check_nodes(x: Tensor, count: int, device: torch.device) -> None:
    """Refuse features without exactly one row per node, or on another device than the graph's."""
    if x.shape[0] != count:
        raise ValueError(f"x has {x.shape[0]} rows, the graph {count} nodes; prepare it with num_nodes={x.shape[0]}")
    if x.device != device:
        raise ValueError(f"x is on {x.device} and the graph on {device}; move one of them, graph.to({x.device})")


def check_edges(edge_index: Tensor, x: Tensor | None = None) -> None:
    """Refuse raw edges of a wrong type or shape, or on another device than x, without reading values."""
    hint = "; transpose it with .t()" if getattr(edge_index, "shape", ())[1:] == (2,) else ""
    if getattr(edge_index, "layout", torch.strided) != torch.strided:
        hint = "; of a transposed adjacency adj_t: torch_geometric.utils.to_edge_index(adj_t)[0].flip(0)"
    device = None if x is None else x.device
    validate.tensor("edge_index", edge_index, "2 E", kinds=(torch.int64,), like=device, like_name="x", hint=hint)


def _node_counts(edge_index: Tensor, num_nodes: int | tuple[int, int] | None) -> tuple[int, int]:
    """(S, D). Checks every index, which reads the minimum and maximum from the device."""
    least, greatest = [0, 0], [-1, -1]
    if edge_index.shape[1]:
        least, greatest = torch.stack(edge_index.aminmax(dim=1)).tolist()
    counts = max(greatest) + 1 if num_nodes is None else num_nodes
    counts = counts if isinstance(counts, tuple) else (counts, counts)
    if len(counts) != 2 or not all(type(count) is int and (count >= 0 or num_nodes is None) for count in counts):
        raise ValueError(f"num_nodes is {num_nodes!r}, expected a count, or (sources, destinations)")
    for what, low, high, count in zip(("source", "destination"), least, greatest, counts, strict=True):
        if low < 0 or high >= count:
            raise ValueError(
                f"edge_index holds {what} {min(low, 0) or high}, but there are {count} nodes (0 to {count - 1}); give "
                "features of every node, or num_nodes where you prepare the graph, or drop the edge"
            )
    return counts
