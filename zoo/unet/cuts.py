"""Where a UNet can be cut into regions: glue alone, transformer blocks, or resnet blocks as well.

``UNet.regions`` is the first of them; any other goes to ``zoo.compile_regions(model, regions=cut(model, name))``.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from zoo.engine.discover import Region, choose_cut
from zoo.unet.blocks import ResnetBlock
from zoo.unet.glue import ConvAdd
from zoo.unet.model import REGIONS
from zoo.unet.transformer import TransformerBlock

_TRANSFORMERS = Region(TransformerBlock, graphs=12, why="glue fuses with what is around it; a graph for each size")

CUTS: dict[str, tuple[Region, ...]] = {
    "glue": REGIONS,
    "glue-static": tuple(dataclasses.replace(region, graphs=16, dynamic=None) for region in REGIONS),
    "transformers": (*(region for region in REGIONS if region.cls is ConvAdd), _TRANSFORMERS),
    "blocks": (
        Region(ResnetBlock, graphs=32, why="glue fuses with what is around it; a graph for each pair of widths"),
        _TRANSFORMERS,
    ),
}


def cut(model: nn.Module, name: str) -> list[Region]:
    """The regions of a cut that this model has modules of.

    Args:
        model: A UNet of the zoo.
        name: One of ``CUTS``.

    Raises:
        ValueError: If there is no such cut.
    """
    return choose_cut(model, CUTS, name)
