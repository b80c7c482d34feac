"""Graph neural networks: GCN, GAT and GraphSAGE over a graph that is prepared once."""

from zoo.gnn.config import PRESETS
from zoo.gnn.config import GATConfig as GATConfig
from zoo.gnn.config import GCNConfig as GCNConfig
from zoo.gnn.config import SAGEConfig as SAGEConfig
from zoo.gnn.convert import WEIGHTS
from zoo.gnn.graph import CSRGraph as CSRGraph
from zoo.gnn.model import GAT as GAT
from zoo.gnn.model import GCN as GCN
from zoo.gnn.model import GATConv as GATConv
from zoo.gnn.model import GCNConv as GCNConv
from zoo.gnn.model import GNNEpilogue as GNNEpilogue
from zoo.gnn.model import GNNHead as GNNHead
from zoo.gnn.model import GNNLayer as GNNLayer
from zoo.gnn.model import GraphSAGE as GraphSAGE
from zoo.gnn.model import SAGEConv as SAGEConv
from zoo.gnn.model import example_inputs
from zoo.gnn.sampling import Bucket as Bucket
from zoo.gnn.sampling import NeighborSampler as NeighborSampler
from zoo.gnn.sampling import SampledBatch as SampledBatch
from zoo.gnn.sampling import Subgraph as Subgraph
from zoo.registry import Family, register

register(
    Family(presets=PRESETS, example_inputs=example_inputs, upstream_packages=("torch_geometric",), weights=WEIGHTS)
)
