"""Raw edges are prepared once and remembered, outside of what is compiled."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.engine.step_buffers import is_step_input
from zoo.gnn.checks import check_edges
from zoo.gnn.csr import CSRGraph, Recipe


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
