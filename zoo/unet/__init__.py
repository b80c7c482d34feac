"""The conditional UNet of Stable Diffusion 1.5, 2.1 and XL, in channels_last, with blocks as regions."""

from zoo.registry import Family, register
from zoo.unet.blocks import PRESETS
from zoo.unet.blocks import Level as Level
from zoo.unet.blocks import ResnetBlock as ResnetBlock
from zoo.unet.blocks import Transformer as Transformer
from zoo.unet.blocks import TransformerBlock as TransformerBlock
from zoo.unet.blocks import UNetConfig as UNetConfig
from zoo.unet.convert import WEIGHTS
from zoo.unet.convert import load as load
from zoo.unet.convert import save as save
from zoo.unet.model import TextKeysValues as TextKeysValues
from zoo.unet.model import TextProjections as TextProjections
from zoo.unet.model import TimeShifts as TimeShifts
from zoo.unet.model import UNet as UNet
from zoo.unet.model import UNetOutput as UNetOutput
from zoo.unet.model import example_inputs
from zoo.unet.sampler import Sampler as Sampler
from zoo.unet.sampler import Schedule as Schedule
from zoo.unet.sampler import make_schedule as make_schedule

register(Family(presets=PRESETS, example_inputs=example_inputs, upstream_packages=("diffusers",), weights=WEIGHTS))
