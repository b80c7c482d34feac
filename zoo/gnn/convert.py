"""To and from torch-geometric's ``GCN``, ``GAT`` and ``GraphSAGE``, which are imported when a model is converted."""

import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zoo.files import upstream
from zoo.gnn.convs import ACTIVATIONS
from zoo.gnn.model import GAT, GCN, GATConfig, GCNConfig, GNNConfig, GraphSAGE, SAGEConfig, build
from zoo.weights import Table, WeightMap

# By the name of the model in both libraries: our config, their convolution, and its attributes that are fields of ours.
_MODELS: dict[str, tuple[type[GNNConfig], str, tuple[str, ...]]] = {
    "GCN": (GCNConfig, "GCNConv", ("improved", "add_self_loops", "normalize", "cached")),
    "GAT": (GATConfig, "GATConv", ("heads", "concat", "negative_slope", "add_self_loops", "residual")),
    "GraphSAGE": (SAGEConfig, "SAGEConv", ("normalize", "root_weight", "project")),
}


def table(config: GNNConfig) -> Table:
    """{theirs: ours}. Their batch norm is a module around torch's, their layer norm holds its weights itself."""
    norm = "norms.{}.module" if config.norm == "batch" else "norms.{}"
    return {"convs.{}": "layers.{}.conv", norm: "layers.{}.epilogue.norm", "lin": "head.lin"}


def skeleton(config: GNNConfig) -> nn.Module:
    """torch-geometric's model on the meta device."""
    pyg = upstream("torch_geometric.nn")

    (name,) = (name for name, (cls, _, _) in _MODELS.items() if cls is type(config))
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del options["act_kwargs"]
    options["act"] = None if config.act is None else ACTIVATIONS[config.act](**config.act_kwargs)
    options["norm_kwargs"] = dict(config.norm_kwargs)
    with torch.device("meta"):
        return getattr(pyg, name)(**options)


def config_of(module: Any) -> GNNConfig:
    """The config of a torch-geometric model, read from its modules; NotImplementedError for other classes."""
    pyg = upstream("torch_geometric.nn")

    convs, name = list(getattr(module, "convs", ())), type(module).__name__
    if name not in _MODELS or type(module) is not getattr(pyg, name):
        raise NotImplementedError(f"{name} is not torch-geometric's GCN, GAT or GraphSAGE, exactly")
    if not isinstance(module.in_channels, int):
        _refuse(name, "in_channels", module.in_channels, "a pair of widths is for a single SAGEConv or GATConv")
    for conv in convs:
        _check_conv(name, conv)
    if len(convs) != module.num_layers:
        _refuse(name, "num_layers", module.num_layers, f"there are {len(convs)} convolutions")
    if module.jk_mode not in (None, "last", "cat", "max"):
        _refuse(name, "jk", module.jk_mode, "None, 'last', 'cat' and 'max' are supported")
    first = convs[0].lin_l if hasattr(convs[0], "lin_l") else convs[0].lin
    if isinstance(first.weight, nn.UninitializedParameter):
        _refuse(name, "in_channels", -1, "its weights do not exist yet; call the model once first")
    ends_in_conv = module.jk_mode is None and getattr(module, "_is_conv_to_out", False)
    shared: dict[str, Any] = {
        "in_channels": int(first.weight.shape[1]),
        "hidden_channels": module.hidden_channels,
        "num_layers": module.num_layers,
        "out_channels": module.out_channels if ends_in_conv or module.jk_mode is not None else None,
        "dropout": module.dropout.p,
        "act_first": module.act_first,
        "jk": module.jk_mode,
        **_activation(name, module.act),
        **_norm(name, module),
    }
    configs = [_MODELS[name][0](**shared, **_conv_options(name, module, conv)) for conv in convs]
    config, last = configs[0], configs[-1]
    if ends_in_conv and isinstance(last, GATConfig) and isinstance(config, GATConfig):
        # The last convolution always averages its heads.
        configs[-1] = dataclasses.replace(last, concat=config.concat)
    for other in configs:
        for field in dataclasses.fields(config):
            first, second = getattr(config, field.name), getattr(other, field.name)
            if first != second:
                _refuse(name, field.name, second, f"another convolution has {first!r}, and all must agree")
    return config


def _conv_options(name: str, module: Any, conv: Any) -> dict[str, Any]:
    from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

    options = {field: getattr(conv, field) for field in _MODELS[name][2]}
    if name == "GraphSAGE":
        aggregations = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max"}
        if type(conv.aggr_module) not in aggregations:
            _refuse(name, "aggr", conv.aggr, "'mean', 'max' and 'sum' are supported")
        return {**options, "aggr": aggregations[type(conv.aggr_module)], "bias": conv.lin_l.bias is not None}
    if type(conv.aggr_module) is not SumAggregation:
        _refuse(name, "aggr", conv.aggr, "only the sum is supported here")
    if name == "GAT" and conv.edge_dim is not None:
        _refuse(name, "edge_dim", conv.edge_dim, "edge features are not supported")
    if name == "GAT" and conv.dropout != module.dropout.p:
        _refuse(name, "dropout", conv.dropout, f"of a convolution, while the model's is {module.dropout.p}")
    return {**options, "bias": conv.bias is not None}


def _check_conv(name: str, conv: Any) -> None:
    pyg = upstream("torch_geometric.nn")

    expected = getattr(pyg, _MODELS[name][1])
    if type(conv) is pyg.GATv2Conv:
        _refuse(name, "v2", True, "only the first version of graph attention is supported")
    if type(conv) is not expected:
        _refuse(name, "convs", type(conv).__name__, f"expected {expected.__name__}")
    for option, fits, why in (
        ("in_channels", isinstance(conv.in_channels, int), "a pair of widths is for a single SAGEConv or GATConv"),
        ("flow", conv.flow == "source_to_target", "swap the rows of edge_index instead"),
        ("node_dim", conv.node_dim in (0, -2), "nodes are rows"),
        ("decomposed_layers", conv.decomposed_layers == 1, "it changes how, not what is computed; drop it"),
    ):
        if not fits:
            _refuse(name, option, getattr(conv, option), why)


def _activation(name: str, act: Any) -> dict[str, Any]:
    if act is None:
        return {"act": None}
    functions: dict[Any, str] = {torch.relu: "relu", torch.tanh: "tanh", torch.sigmoid: "sigmoid"} | {
        getattr(F, key): key for key in ("relu", "elu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid")
    }
    by_class = {cls: key for key, cls in ACTIVATIONS.items()}
    key = by_class.get(type(act)) or (functions.get(act) if callable(act) and not isinstance(act, nn.Module) else None)
    if key is None:
        _refuse(name, "act", act, f"supported are {', '.join(ACTIVATIONS)}")
    options: dict[str, Any] = {}
    if isinstance(act, nn.Module):
        for option, parameter in inspect.signature(type(act)).parameters.items():
            value = getattr(act, option, parameter.default)
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and value != parameter.default:
                options[option] = value
    return {"act": key, "act_kwargs": options}


def _norm(name: str, module: Any) -> dict[str, Any]:
    pyg = upstream("torch_geometric.nn")

    hidden = [norm for norm in module.norms if type(norm) is not nn.Identity]
    if not hidden:
        return {"norm": None}
    norm = hidden[0]
    expected = len(module.norms) - (module.jk_mode is None)
    kinds: set[tuple[Any, ...]] = set()
    for each in hidden:
        if type(each) is pyg.BatchNorm:
            if each.allow_single_element:
                _refuse(name, "norm_kwargs", {"allow_single_element": True}, "one node has no variance")
            kind, own = "batch", ("eps", "momentum", "affine", "track_running_stats")
            options = {key: getattr(each.module, key) for key in own}
        elif type(each) is pyg.LayerNorm:
            kind, options = "layer", {key: getattr(each, key) for key in ("eps", "affine", "mode")}
        else:
            _refuse(name, "norm", type(each).__name__, "torch-geometric's BatchNorm and LayerNorm are supported")
        kinds.add((kind, *options.items()))
    if len(kinds) > 1 or len(hidden) != expected:
        _refuse(name, "norms", [type(each).__name__ for each in module.norms], "all layers must have the same")
    if kind == "batch" and options["momentum"] is None:
        _refuse(name, "norm_kwargs", {"momentum": None}, "a cumulative average reads the device at each step")
    defaults = inspect.signature(type(norm)).parameters
    return {"norm": kind, "norm_kwargs": {k: v for k, v in options.items() if v != defaults[k].default}}


def _refuse(name: str, option: str, value: Any, why: str) -> None:
    raise ValueError(f"torch-geometric's {name} with {option}={value!r} is not supported: {why}")


WEIGHTS: WeightMap[GCN | GAT | GraphSAGE] = WeightMap(
    name="gnn", noun="a GCN, GAT or GraphSAGE", classes=(GCN, GAT, GraphSAGE), table=table, config_of=config_of,
    skeleton=skeleton, build=build,
)  # fmt: skip
