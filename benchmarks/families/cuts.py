"""Other regions than a model of the zoo declares, by family; models named ``-cut-<name>`` at the end race them."""

from __future__ import annotations

from torch import nn

from zoo.bert import Bert, BertEmbeddings, PoolerHead, SequenceHead, SpanHead, TokenHead
from zoo.engine.region import Region
from zoo.resnet import ResNet, ResNetHead, ResNetStage, Stem
from zoo.unet import ResnetBlock, UNet

MARK = "-cut-"
_ENDS = tuple(region for region in ResNet.regions if region.cls in (Stem, ResNetHead))

CUTS: dict[str, dict[str, tuple[Region, ...]]] = {
    "bert": {
        "layers-and-ends": (
            Region(BertEmbeddings, graphs=1, why="three look-ups, their sum and a norm in one kernel"),
            *Bert.regions,
            Region(PoolerHead, graphs=1, why="product and activation, on the first tokens"),
            Region(SequenceHead, graphs=1, why="two small products, the activation between them and the loss"),
            Region(TokenHead, graphs=1, why="a narrow product and the loss"),
            Region(SpanHead, graphs=1, why="a narrow product and two losses"),
        ),
    },
    "resnet": {"stages": (*_ENDS, Region(ResNetStage, graphs=4, why="all blocks of a stage")), "ends": _ENDS},
    # As diffusers' helper cuts its model.
    "unet": {"transformers": tuple(region for region in UNet.regions if region.cls is not ResnetBlock)},
}


def cut(model: nn.Module, family: str, name: str) -> None:
    """Make the model one that declares the regions of ``CUTS[family][name]``, so that every strategy finds them."""
    model.__class__ = type(type(model).__name__, (type(model),), {"regions": CUTS[family][name]})
