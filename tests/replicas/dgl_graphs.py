"""A small stand-in for DGL, which has no wheel for every machine: its public functions and names, rewritten.

As in DGL 2: a graph that was not batched, or that was changed since, is a batch of one; ``batch`` takes batches, keeps
features by type of node and edge, and refuses others' schemas; ``unbatch`` splits by the numbers of nodes and edges.
"""

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Relation = tuple[str, str, str]


class DGLError(Exception):
    """DGL's own."""


class Graph:
    """Nodes of several types, edges of several relations, and features of both."""

    def __init__(self, edges: dict[Relation, Any], num_nodes: dict[str, int]) -> None:
        self._edges = {relation: tuple(map(torch.as_tensor, ends)) for relation, ends in edges.items()}
        self._num_nodes = dict(num_nodes)
        self._nodes: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in num_nodes}
        self._of_edges: dict[Relation, dict[str, torch.Tensor]] = {relation: {} for relation in edges}
        self._batch: tuple[dict[str, torch.Tensor], dict[Relation, torch.Tensor]] | None = None

    @property
    def ntypes(self) -> list[str]:
        return list(self._num_nodes)

    @property
    def canonical_etypes(self) -> list[Relation]:
        return list(self._edges)

    @property
    def ndata(self) -> dict[str, torch.Tensor]:
        (only,) = self._nodes.values()
        return only

    @property
    def edata(self) -> dict[str, torch.Tensor]:
        (only,) = self._of_edges.values()
        return only

    def num_nodes(self, ntype: str | None = None) -> int:
        return sum(self._num_nodes.values()) if ntype is None else self._num_nodes[ntype]

    def num_edges(self, etype: Relation | None = None) -> int:
        return sum(map(self.num_edges, self._edges)) if etype is None else len(self._edges[etype][0])

    def edges(self, etype: Relation | None = None) -> Any:
        return self._edges[etype or next(iter(self._edges))]

    @property
    def batch_size(self) -> int:
        return len(self.batch_num_nodes(self.ntypes[0]))

    def batch_num_nodes(self, ntype: str | None = None) -> torch.Tensor:
        ntype = ntype or self.ntypes[0]
        return torch.tensor([self.num_nodes(ntype)]) if self._batch is None else self._batch[0][ntype]

    def batch_num_edges(self, etype: Relation | None = None) -> torch.Tensor:
        etype = etype or self.canonical_etypes[0]
        return torch.tensor([self.num_edges(etype)]) if self._batch is None else self._batch[1][etype]

    def add_edges(self, sources: Any, targets: Any) -> None:
        """Which makes of a batch one graph."""
        ((relation, ends),) = self._edges.items()
        self._edges[relation] = tuple(
            torch.cat([end, torch.as_tensor(more)]) for end, more in zip(ends, (sources, targets), strict=True)
        )
        self._batch = None

    def to(self, device: Any, **_: Any) -> "Graph":
        moved = type(self)(
            {key: [end.to(device) for end in ends] for key, ends in self._edges.items()}, self._num_nodes
        )
        moved._nodes = {kind: {k: v.to(device) for k, v in data.items()} for kind, data in self._nodes.items()}
        moved._of_edges = {kind: {k: v.to(device) for k, v in data.items()} for kind, data in self._of_edges.items()}
        moved._batch = self._batch
        return moved


def batch(graphs: Sequence[Any]) -> Any:
    """One graph of all, which are its parts."""
    if not graphs:
        raise DGLError("The input list of graphs cannot be empty.")
    first = graphs[0]
    before = dict.fromkeys(first.ntypes, 0)
    edges: dict[Relation, Any] = {relation: ([], []) for relation in first.canonical_etypes}
    for graph in graphs:
        for relation, (sources, targets) in edges.items():
            sources.append(graph.edges(relation)[0] + before[relation[0]])
            targets.append(graph.edges(relation)[1] + before[relation[2]])
        before = {kind: count + graph.num_nodes(kind) for kind, count in before.items()}
    joined = {relation: (torch.cat(sources), torch.cat(targets)) for relation, (sources, targets) in edges.items()}
    result = type(first)(joined, before)
    result._batch = (
        {kind: torch.cat([graph.batch_num_nodes(kind) for graph in graphs]) for kind in before},
        {relation: torch.cat([graph.batch_num_edges(relation) for graph in graphs]) for relation in edges},
    )
    for kind in before:
        result._nodes[kind] = _joined([graph._nodes[kind] for graph in graphs if graph.num_nodes(kind)])
    for relation in edges:
        result._of_edges[relation] = _joined(
            [graph._of_edges[relation] for graph in graphs if graph.num_edges(relation)]
        )
    return result


def _joined(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if any(other.keys() != features[0].keys() for other in features):
        raise DGLError("Expect all graphs to have the same schema.")
    return {key: torch.cat([one[key] for one in features]) for key in features[0]} if features else {}


def unbatch(graph: Any) -> list[Any]:
    """The parts of a batch."""
    num_nodes = {kind: graph.batch_num_nodes(kind).tolist() for kind in graph.ntypes}
    num_edges = {relation: graph.batch_num_edges(relation).tolist() for relation in graph.canonical_etypes}
    parts = []
    for index in range(graph.batch_size):
        edges = {}
        for relation, counts in num_edges.items():
            start = sum(counts[:index])
            ends = zip(graph.edges(relation), (relation[0], relation[2]), strict=True)
            own = [end[start : start + counts[index]] - sum(num_nodes[kind][:index]) for end, kind in ends]
            edges[relation] = own
        part = type(graph)(edges, {kind: counts[index] for kind, counts in num_nodes.items()})
        for features, of_whole, sizes in (
            (part._nodes, graph._nodes, num_nodes),
            (part._of_edges, graph._of_edges, num_edges),
        ):
            for kind, data in of_whole.items():
                features[kind] = {key: value.split(sizes[kind])[index] for key, value in data.items()}
        parts.append(part)
    return parts


@contextmanager
def dgl_with(name: str) -> Iterator[Any]:
    """The module ``dgl``, whose graphs are of a class ``dgl.heterograph.NAME``; for a while."""
    module: Any = types.ModuleType("dgl")
    kind = type(name, (Graph,), {"__module__": "dgl.heterograph", "__qualname__": name})
    module.DGLGraph, module.batch, module.unbatch, module.DGLError = kind, batch, unbatch, DGLError

    def graph(ends: Any, num_nodes: int) -> Any:
        return kind({("_N", "_E", "_N"): ends}, {"_N": num_nodes})

    module.graph, module.heterograph = graph, kind
    before = sys.modules.get("dgl")
    sys.modules["dgl"] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules["dgl"]
        else:
            sys.modules["dgl"] = before
