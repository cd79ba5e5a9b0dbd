"""Graph networks of PyTorch Geometric on one small random graph, or on a batch of points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.case import Case, mean_square, single

NODES, EDGES, FEATURES, WIDTH, CLASSES = 24, 60, 8, 16, 4


def _edges() -> torch.Tensor:
    return torch.randint(NODES, (2, EDGES))


def _nodes() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NODES, FEATURES), _edges()


class Layers(nn.Module):
    """Two graph convolutions of one kind."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(FEATURES, WIDTH), kind(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edges).relu(), edges)


class Pooled(nn.Module):
    """A classifier of graphs: convolutions, then the mean over the nodes of each graph."""

    def __init__(self, pool: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        import torch_geometric.nn as geometric

        self.layers, self.pool = geometric.GIN(FEATURES, WIDTH, 2), pool
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.layers(x, edges), graph))


def classified(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def cases() -> Iterator[Case]:
    """Yields models of nodes, of graphs, and of molecules."""
    import torch_geometric.nn as geometric

    models = {
        "GCN": lambda: geometric.GCN(FEATURES, WIDTH, 2, CLASSES, dropout=0.1),
        "GraphSAGE": lambda: geometric.GraphSAGE(FEATURES, WIDTH, 2, CLASSES),
        "GAT": lambda: geometric.GAT(FEATURES, WIDTH, 2, CLASSES, heads=2),
        "GATv2": lambda: geometric.GAT(FEATURES, WIDTH, 2, CLASSES, heads=2, v2=True),
        "GIN": lambda: geometric.GIN(FEATURES, WIDTH, 2, CLASSES),
        "EdgeCNN": lambda: geometric.EdgeCNN(FEATURES, WIDTH, 2, CLASSES),
        "PNA": lambda: geometric.PNA(
            FEATURES,
            WIDTH,
            2,
            CLASSES,
            aggregators=["mean", "max", "std"],
            scalers=["identity", "amplification"],
            deg=torch.tensor([1, 5, 8, 6, 4]),
        ),
        "GraphUNet": lambda: geometric.GraphUNet(FEATURES, WIDTH, CLASSES, depth=2),
        "LINKX": lambda: geometric.LINKX(NODES, FEATURES, WIDTH, CLASSES, 2),
        "PMLP": lambda: geometric.PMLP(FEATURES, WIDTH, CLASSES, 2),
        "Cheb": lambda: Layers(lambda a, b: geometric.ChebConv(a, b, K=2)),
        "Transformer": lambda: Layers(lambda a, b: geometric.TransformerConv(a, b)),
        "ARMA": lambda: Layers(lambda a, b: geometric.ARMAConv(a, b)),
        "SG": lambda: Layers(lambda a, b: geometric.SGConv(a, b, K=2)),
        "TAG": lambda: Layers(lambda a, b: geometric.TAGConv(a, b)),
        "GEN": lambda: Layers(lambda a, b: geometric.GENConv(a, b)),
        "Graph": lambda: Layers(lambda a, b: geometric.GraphConv(a, b)),
        "FiLM": lambda: Layers(lambda a, b: geometric.FiLMConv(a, b)),
    }
    for name, model in models.items():
        loss_fn = classified
        batch = lambda: (*_nodes(), torch.randint(CLASSES, (NODES,)))
        if name == "LINKX":
            batch = lambda: (_nodes()[0], _edges(), torch.randint(CLASSES, (NODES,)))
            model = lambda model=model: _Swapped(model())
        build = lambda model=model, batch=batch, loss_fn=loss_fn: (model(), batch(), loss_fn)
        yield Case(library="torch_geometric", name=name, candidates=single(build))
    graph_of_node = torch.arange(NODES) // 6
    for name, pool in (("mean", geometric.global_mean_pool), ("max", geometric.global_max_pool)):
        build = lambda pool=pool: (Pooled(pool), (*_nodes(), graph_of_node.clone()), None)
        yield Case(library="torch_geometric", name=f"graphs, {name}", candidates=single(_squared(build)))
    molecules = {
        "SchNet": lambda: geometric.SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8),
        "ViSNet": lambda: geometric.ViSNet(hidden_channels=16, num_layers=1, num_heads=2, num_rbf=8),
        "DimeNet++": lambda: geometric.DimeNetPlusPlus(16, 1, 1, 8, 8, 8, 3, 3),
    }
    for name, model in molecules.items():
        batch = lambda: (torch.randint(1, 9, (NODES,)), torch.randn(NODES, 3), torch.arange(NODES) // 6)
        build = lambda model=model, batch=batch: (model(), batch(), None)
        yield Case(library="torch_geometric", name=name, candidates=single(_squared(build)))


class _Swapped(nn.Module):
    """LINKX takes the edges after the features, too, but for them a keyword."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.inner(x, edges)


def _squared(build: Callable[[], tuple[nn.Module, tuple, None]]) -> Callable[[], tuple[nn.Module, tuple, Any]]:
    """Returns the model with the mean square of its outputs as the loss, and a batch whose last item is not used."""

    def built() -> tuple[nn.Module, tuple, Any]:
        model, batch, _ = build()
        return model, (*batch, torch.zeros(NODES)), mean_square

    return built
