"""Where an encoder can be cut into regions: layers alone, or what stands before and behind them as well.

``Bert.regions`` is the first of them; the other goes to ``zoo.compile_regions(model, regions=cut(model, name))``.
"""

from __future__ import annotations

from torch import nn

from zoo.bert.heads import PoolerHead, SequenceHead, SpanHead, TokenHead
from zoo.bert.layer import BertEmbeddings
from zoo.bert.model import REGIONS
from zoo.engine.discover import Region, choose_cut

CUTS: dict[str, tuple[Region, ...]] = {
    "layers": REGIONS,
    "layers-and-ends": (
        Region(BertEmbeddings, graphs=1, why="three look-ups, their sum and a norm in one kernel"),
        *REGIONS,
        Region(PoolerHead, graphs=1, why="product and activation, on the first tokens"),
        Region(SequenceHead, graphs=1, why="two small products, the activation between them and the loss"),
        Region(TokenHead, graphs=1, why="a narrow product and the loss"),
        Region(SpanHead, graphs=1, why="a narrow product and two losses"),
    ),
}


def cut(model: nn.Module, name: str) -> list[Region]:
    """The regions of a cut that this model has modules of.

    Args:
        model: An encoder of the zoo.
        name: One of ``CUTS``.

    Raises:
        ValueError: If there is no such cut.
    """
    return choose_cut(model, CUTS, name)
