"""Regional compilation model zoo: models whose blocks compile once and are reused by every copy.

``import zoo`` imports torch and nothing heavier; upstream libraries come in only when a model is converted.
"""

# First of all: it refuses a torch that is too old for the rest.
import zoo.engine.compat as compat  # noqa: F401
from zoo import bert as bert
from zoo import gnn as gnn
from zoo import llm as llm
from zoo import resnet as resnet
from zoo import training as training
from zoo import unet as unet
from zoo.engine.artifacts import ArtifactError as ArtifactError
from zoo.engine.artifacts import SavedRegions as SavedRegions
from zoo.engine.artifacts import load_compiled as load_compiled
from zoo.engine.artifacts import save_compiled as save_compiled
from zoo.engine.budget import BudgetError as BudgetError
from zoo.engine.budget import enforce_budget as enforce_budget
from zoo.engine.call import RegionError as RegionError
from zoo.engine.call import RegionWarning as RegionWarning
from zoo.engine.compile import compile_regions as compile_regions
from zoo.engine.compile import uncompile as uncompile
from zoo.engine.compile import warm_up as warm_up
from zoo.engine.cuda_graph import captures as captures
from zoo.engine.cuda_graph import cuda_graph as cuda_graph
from zoo.engine.discover import find_regions as find_regions
from zoo.engine.region import Region as Region
from zoo.registry import create as create
from zoo.registry import example_inputs as example_inputs
from zoo.registry import from_upstream as from_upstream
from zoo.registry import list_models as list_models
from zoo.registry import to_upstream as to_upstream
from zoo.weights import WeightsWarning as WeightsWarning

__version__ = "0.1.0"
