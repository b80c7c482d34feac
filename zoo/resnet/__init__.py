"""ResNet, ResNeXt and wide ResNet in channels_last, with the glue between convolutions as regions."""

from zoo.registry import Family, register
from zoo.resnet.config import Folding as Folding
from zoo.resnet.config import ResNetConfig as ResNetConfig
from zoo.resnet.cuts import CUTS as CUTS
from zoo.resnet.cuts import cut as cut
from zoo.resnet.folding import fold_batch_norm as fold_batch_norm
from zoo.resnet.glue import BiasAct as BiasAct
from zoo.resnet.glue import BiasActPool as BiasActPool
from zoo.resnet.glue import BiasAddAct as BiasAddAct
from zoo.resnet.glue import NormAct as NormAct
from zoo.resnet.glue import NormActPool as NormActPool
from zoo.resnet.glue import NormAddAct as NormAddAct
from zoo.resnet.glue import NormsAddAct as NormsAddAct
from zoo.resnet.glue import ResNetHead as ResNetHead
from zoo.resnet.model import BasicBlock as BasicBlock
from zoo.resnet.model import Bottleneck as Bottleneck
from zoo.resnet.model import ResNet as ResNet
from zoo.resnet.model import ResNetStage as ResNetStage
from zoo.resnet.presets import PRESETS, build, example_inputs
from zoo.resnet.pretrained import find_weights
from zoo.resnet.pretrained import transforms as transforms

FAMILY = register(
    Family(
        name="resnet",
        presets=PRESETS,
        build=build,
        model_types=(ResNet,),
        example_inputs=example_inputs,
        upstream_module="zoo.resnet.upstream",
        upstream_packages=("torchvision",),
        find_weights=find_weights,
    )
)
