"""Where a ResNet can be cut into regions: the glue between convolutions, blocks, whole stages, or the ends alone.

``ResNet.regions`` is the first of them, of which nothing but the stem is left where our kernels run. Any other goes to
``zoo.compile_regions(model, regions=cut(model, name))``.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from zoo.engine.discover import Region, choose_cut
from zoo.resnet.glue import BiasAct, BiasActPool, BiasAddAct, NormAct, NormActPool, NormAddAct, NormsAddAct, ResNetHead
from zoo.resnet.model import REGIONS, BasicBlock, Bottleneck, ResNetStage

# (rows, channels) that occur in one model. Inside bottlenecks a stage but the first has two: before its stride and
# after it.
_STATIC_GRAPHS = {NormAct: 7, NormAddAct: 4, NormsAddAct: 4, BiasAct: 7, BiasAddAct: 4}
_GLUE = tuple(dataclasses.replace(region, eager_on=None) for region in REGIONS)
_ENDS = tuple(region for region in _GLUE if region.cls in (NormActPool, BiasActPool, ResNetHead))

CUTS: dict[str, tuple[Region, ...]] = {
    "glue": _GLUE,
    "glue-static": tuple(
        dataclasses.replace(region, graphs=_STATIC_GRAPHS[region.cls], dynamic=None) if region.dynamic else region
        for region in _GLUE
    ),
    "blocks": (
        Region(BasicBlock, graphs=8, why="each stage's first block and its repeats"),
        Region(Bottleneck, graphs=8, why="each stage's first block and its repeats"),
        *_ENDS,
    ),
    "stages": (Region(ResNetStage, graphs=4, why="the blocks of a stage fuse across their borders"), *_ENDS),
    "ends": _ENDS,
}


def cut(model: nn.Module, name: str) -> list[Region]:
    """The regions of a cut that this model has modules of.

    Args:
        model: A ResNet of the zoo.
        name: One of ``CUTS``.

    Raises:
        ValueError: If there is no such cut.
    """
    return choose_cut(model, CUTS, name)
