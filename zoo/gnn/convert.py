"""To and from torch-geometric's ``GCN``, ``GAT`` and ``GraphSAGE``, which are imported when a model is converted."""

import dataclasses
import inspect
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from zoo.files import upstream
from zoo.gnn.config import ACTIVATIONS, GNNConfig
from zoo.gnn.model import GAT, GCN, MODELS, GraphSAGE
from zoo.weights import Table, WeightMap, refuse_changed, unsupported

# {model name: (config, convolution name)}; attributes of torch-geometric's convolution are the config's fields.
_MODELS = {model.__name__: (config, conv.__name__) for config, (model, conv) in MODELS.items()}
# {torch-geometric's norm: the zoo's}.
_NORMS = {"BatchNorm": "batch", "LayerNorm": "layer"}


def table(config: GNNConfig) -> Table:
    """{torch-geometric's name: the zoo's name}. Its batch norm wraps torch's; its layer norm holds its own weights."""
    norm = "norms.{}.module" if config.norm == "batch" else "norms.{}"
    return {"convs.{}": "layers.{}.conv", norm: "layers.{}.epilogue.norm", "lin": "head.lin"}


def skeleton(config: GNNConfig) -> Any:
    """torch-geometric's model on the meta device."""
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    act_kwargs = options.pop("act_kwargs")
    options["act"] = None if config.act is None else ACTIVATIONS[config.act](**act_kwargs)
    options["norm_kwargs"] = dict(config.norm_kwargs)
    with torch.device("meta"):
        return getattr(upstream("torch_geometric.nn"), MODELS[type(config)][0].__name__)(**options)


def config_of(module: Any) -> GNNConfig:
    """The config of a torch-geometric model, read from its modules; NotImplementedError for other classes."""
    pyg, name = upstream("torch_geometric.nn"), type(module).__name__
    if name not in _MODELS or type(module) is not getattr(pyg, name):
        layer = f": load its state_dict into a zoo.gnn.{name}" if name in (conv for _, conv in _MODELS.values()) else ""
        raise NotImplementedError(f"{name} is none of torch-geometric's classes GCN, GAT and GraphSAGE{layer}")
    (cls, conv_name), conv = _MODELS[name], module.convs[0]
    if type(conv) is not getattr(pyg, conv_name):
        _refuse(module, "convs.0", type(conv).__name__, f"expected {conv_name}")
    if not isinstance(module.in_channels, int):
        _refuse(module, "in_channels", module.in_channels, "nodes have features of one width")
    linear = conv.lin_l if name == "GraphSAGE" else conv.lin
    if not isinstance(getattr(linear, "weight", None), nn.Parameter):
        _refuse(module, "convs.0.lin", type(linear).__name__, "expected torch-geometric's Linear")
    if isinstance(linear.weight, nn.UninitializedParameter):
        _refuse(module, "in_channels", -1, "its weights do not exist yet; call the model once first")
    own = {field: getattr(conv, field) for field in cls.conv_fields() if field != "bias"}
    own["bias"] = (linear if name == "GraphSAGE" else conv).bias is not None
    if name == "GraphSAGE":
        own["aggr"] = "sum" if conv.aggr == "add" else conv.aggr
    ends_in_conv = module.jk_mode is None and getattr(module, "_is_conv_to_out", False)
    config = cls(
        in_channels=int(linear.weight.shape[1]), hidden_channels=module.hidden_channels, num_layers=module.num_layers,
        out_channels=module.out_channels if ends_in_conv or module.jk_mode is not None else None,
        dropout=module.dropout.p, act_first=module.act_first, jk=module.jk_mode, **_activation(module),
        **_norm(module), **own,
    )  # fmt: skip
    ours, theirs = (nn.ModuleDict({"convs": each.convs, "norms": each.norms}) for each in (skeleton(config), module))
    # Equal convolutions may differ in lazy widths, aliases of an aggregation, and caching: the zoo always caches.
    refuse_changed(dict(theirs.named_modules()), ours, f"torch-geometric's {name}", "in_channels", "aggr", "cached")
    return config


def _activation(module: Any) -> dict[str, Any]:
    act = module.act
    if act is None:
        return {"act": None}
    for key, cls in ACTIVATIONS.items():
        if type(act) is cls:
            return {"act": key, "act_kwargs": _options(cls, act)}
        if any(act is getattr(where, key, None) for where in (torch, F)):
            return {"act": key}
    _refuse(module, "act", act, f"supported are {', '.join(ACTIVATIONS)}")


def _norm(module: Any) -> dict[str, Any]:
    norm = next((norm for norm in module.norms if type(norm) is not nn.Identity), None)
    if norm is None:
        return {"norm": None}
    name = type(norm).__name__
    if name not in _NORMS or type(norm) is not getattr(upstream("torch_geometric.nn"), name):
        _refuse(module, "norm", norm, f"supported are torch-geometric's {' and '.join(_NORMS)}")
    return {"norm": _NORMS[name], "norm_kwargs": _options(type(norm), getattr(norm, "module", norm))}


def _options(cls: type, holder: Any) -> dict[str, Any]:
    """The optional arguments of a class that differ from its defaults, read from ``holder``."""
    parameters = inspect.signature(cls).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    given = {name: getattr(holder, name, default) for name, default in defaults.items()}
    return {name: value for name, value in given.items() if value != defaults[name]}


def _refuse(module: nn.Module, option: str, value: Any, why: str) -> NoReturn:
    unsupported(f"torch-geometric's {type(module).__name__}", option, value, why)


WEIGHTS: WeightMap[GCN | GAT | GraphSAGE] = WeightMap(
    name="gnn", noun="a GCN, GAT or GraphSAGE", classes=(GCN, GAT, GraphSAGE), table=table, config_of=config_of,
    skeleton=skeleton, build=lambda config: MODELS[type(config)][0](config),
)  # fmt: skip
