"""What can be compiled, what stands in its way, and what it costs: also of models that the zoo did not write."""

import enum
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn

import zoo
from benchmarks.conformance import MODELS, OURS, losses, row, rows_of
from tests.blocks import Block, Child, Dropping, IndexedBlock, Sequence, Stack, Wired, declared, graphs_of, nested
from zoo import Region
from zoo.engine import compat
from zoo.engine.compile import MANY_SHAPES


def test_regions_are_grouped_by_signature_and_given_and_left_out_by_class_and_by_path() -> None:
    report = zoo.find_regions(Stack(depth=3))
    (found,) = report.regions
    assert report.declared and found.name == "Block"
    assert found.signatures == (("blocks.0", "blocks.1", "blocks.2"),)
    assert report.graphs_needed == 1 and not report.obstacles
    assert 0.8 < report.coverage < 1 and f"{report.coverage:.0%} of the weights in regions" in str(report)
    text = str(zoo.find_regions(Sequence(Block(4), Block(4), Block(8), Block(8))))
    assert "Block: 4 module(s), 2 graph(s), budget 2" in text
    assert "2 x blocks.0, blocks.1" in text and "2 x blocks.2, blocks.3" in text
    assert "differs: parameters: linear.weight (4, 4)" in text
    model = Sequence(Block(4), Block(4), Block(4))
    assert zoo.find_regions(model, exclude=["blocks.1"]).regions[0].modules == ("blocks.0", "blocks.2")
    assert not zoo.find_regions(model, exclude=[Block]).regions
    nested = nn.Sequential(Sequence(Block(4), Block(4)), Block(4))
    for exclude in (["0.blocks"], [nn.ModuleList], [Sequence]):  # with what is inside
        assert zoo.find_regions(nested, [Block], exclude=exclude).regions[0].modules == ("1",)
    towers = Sequence(Tower(3), Tower(3))
    (found,) = zoo.find_regions(towers, ["blocks.*.blocks.1"]).regions
    assert found.modules == ("blocks.0.blocks.1", "blocks.1.blocks.1")
    (found,) = zoo.find_regions(towers, [Mlp], exclude=["blocks.1.blocks.*"]).regions
    assert found.modules == ("blocks.0.blocks.0", "blocks.0.blocks.1", "blocks.0.blocks.2")


class StoringBlock(IndexedBlock):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()

    def extra_repr(self) -> str:
        return f"index={self.index}"


def test_an_index_that_is_read_and_an_inherited_forward_are_obstacles_and_an_index_that_is_stored_is_not() -> None:
    blocks = [IndexedBlock(index=i) for i in range(5)]
    read = zoo.find_regions(declared(Region(IndexedBlock))(*blocks))
    assert read.graphs_needed == 5
    assert "reads index (in some branch), which differs in every layer (0, 1, 2, 3, ... (5))" in str(read.obstacles[0])
    # Where the model does not declare its regions, it is a symbol.
    symbol = zoo.find_regions(Sequence(*blocks))
    assert symbol.graphs_needed == 1 and not symbol.obstacles
    stored = zoo.find_regions(Sequence(*(StoringBlock(index=i) for i in range(5))))
    assert stored.graphs_needed == 1 and not stored.obstacles
    (obstacle,) = zoo.find_regions(Sequence(Child(4), Child(4)), [Child]).obstacles
    assert "inherits forward from Block" in str(obstacle)
    model = Sequence(*(IndexedBlock(index=index) for index in (0, 1, 1)))
    report = zoo.find_regions(model, [IndexedBlock])
    assert report.graphs_needed == 2 and report.obstacles == ()


def test_inputs_tell_layers_apart_and_find_a_bypass_and_a_report_says_so() -> None:
    class Bypass(Sequence):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            x = self.blocks[1](x.repeat(2, 1))
            return self.blocks[2].forward(x)

    model, x = Bypass(Block(4), Block(4), Block(4)).eval(), torch.randn(2, 4)
    report = zoo.find_regions(model, kwargs={"x": x})
    assert zoo.find_regions(model, args=(x,)) == report
    assert report.regions[0].signatures == (("blocks.0", "blocks.2"), ("blocks.1",))
    assert re.search(r"blocks.2 was not called as a module: .*exclude=\['blocks.2'\]", str(report.obstacles[0]))
    model, x = Refining().eval(), torch.randn(2, 8)
    said = "give zoo.compile_regions the same args= and kwargs="
    assert said not in str(zoo.find_regions(model)) and said in str(zoo.find_regions(model, args=(x,)))
    assert said not in str(zoo.find_regions(model, [Core], args=(x,)))


def test_the_report_says_which_inputs_and_which_entries_of_a_configuration_differ() -> None:
    class Passing(nn.Linear):
        def __init__(self, scale: int) -> None:
            super().__init__(4, 4)
            self.config = SimpleNamespace(width=4, scale=scale)

        def forward(self, x: Tensor, mask: Any = None, store: Any = None) -> Tensor:
            return super().forward(x) * self.config.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Passing(index // 3) for index in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x).T, None, store={"x": x})
            return self.blocks[3](self.blocks[2](x, x, store={"x": 1}))

    text = str(zoo.find_regions(Model().eval(), [Passing], args=(torch.randn(4, 4),)))
    assert "differs: config: scale 0, scale 1\n" in text
    assert "differs: inputs[0], strides: (4, 1) / (1, 4)\n" in text
    assert "differs: inputs[1]: not given / None / a tensor\n" in text
    assert "differs: inputs['store']['x']: not given / a tensor / 1" in text


@pytest.mark.parametrize("training", [False, True])
def test_rates_of_torchs_dropout_are_constants_and_cost_a_graph_each(training: bool) -> None:
    def block(width: int, rate: float) -> Block:
        return Block(linear=nn.Sequential(nn.Linear(width, width), nn.Dropout(rate)))

    model = Sequence(block(4, 0.1), block(4, 0.2), block(4, 0.3)).train(training)
    report = zoo.find_regions(model, [Block], kwargs={"x": torch.ones(2, 4)})
    assert report.graphs == "3" and "differs: linear.1.p: 0.1, 0.2, 0.3\n" in f"{report}\n"
    zoo.compile_regions(model, regions=[Block], kwargs={"x": torch.ones(2, 4)}, backend="eager")
    with zoo.enforce_budget(model):
        assert zoo.warm_up(model, x=torch.ones(2, 4)).graphs == 3


@pytest.mark.gpu
def test_device_share_on_a_gpu() -> None:
    model = Stack(width=512, depth=4).cuda()
    report = zoo.find_regions(model, kwargs={"x": torch.randn(4096, 4, device="cuda")})
    share = report.regions[0].device_share
    assert share is not None and 0.5 < share <= 1.0
    assert "% of device time" in str(report)


@pytest.mark.parametrize("regions", [None, [Block]])
def test_parameters_without_a_shape_are_refused_until_they_have_one(regions: list[type[nn.Module]] | None) -> None:
    model = Sequence(*(Block(linear=nn.LazyLinear(4)) for _ in range(2)))
    with pytest.raises(ValueError, match=r"region Block: blocks\.0\.linear\.weight has no shape .* call the model"):
        zoo.find_regions(model, regions)
    model(torch.ones(2, 4))
    assert zoo.find_regions(model, regions).graphs_needed == 1


class Counting(Wired):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, self.seen.new_ones(1)])
        self.last = x.mean() * random.random() * np.random.random()
        return self.linear(x)


def test_observing_a_model_in_training_leaves_it_as_it_was() -> None:
    model = Sequence(Dropping(4), Dropping(4), Counting()).train()
    before, seen = {k: v.clone() for k, v in model.state_dict().items()}, model.blocks[2].seen
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    zoo.find_regions(model, [Dropping, Counting], kwargs={"x": torch.ones(8, 4)})
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), states[0]) and type(model.blocks[0]) is Dropping
    assert (random.getstate(), np.random.get_state()[2]) == states[1:]
    assert model.blocks[2].seen is seen and model.blocks[2].last is None
    with pytest.raises(TypeError):
        zoo.find_regions(model, kwargs={"wrong": 1})
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).relu()


class Tower(Sequence):
    """A stack: its copies are no regions, its blocks are."""

    def __init__(self, depth: int) -> None:
        super().__init__(*(Mlp() for _ in range(depth)))
        self.stem = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


def holder() -> nn.Module:
    """Parts that the model calls one by one, in a module that is never called."""
    held = nn.Module()
    held.first, held.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return held


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "found"),
    [
        pytest.param(nested, {"Sequence": 2}, id="the outermost class"),
        pytest.param(lambda: Sequence(Block(2), Block(4), Block(8)), {}, id="copies that share nothing"),
        pytest.param(
            lambda: nn.ModuleList(nn.Sequential(*(nn.Linear(w, w) for _ in range(4))) for w in (2, 2, 3, 4, 5, 6)), {},
            id="copies that mostly differ",
        ),
        pytest.param(lambda: Sequence(Tower(6), Tower(6)), {"Mlp": 12}, id="the blocks of equal towers"),
        pytest.param(
            lambda: nn.ModuleList([Stack(), *(torch.jit.script(nn.Linear(4, 4)) for _ in range(2))]), {"Block": 3},
            id="no scripted module",
        ),
        pytest.param(lambda: nn.ModuleList(scripted() for _ in range(3)), {}, id="no scripted block"),
        pytest.param(lambda: nn.ModuleList(holder() for _ in range(4)), {"Sequential": 4}, id="what a container holds"),
    ],
)  # fmt: skip
def test_discovery_takes(make: Callable[[], nn.Module], found: dict[str, int]) -> None:
    regions = zoo.find_regions(make()).regions
    assert {each.name: len(each.modules) for each in regions} == found
    assert all(each.graphs_needed == 1 for each in regions)


def test_blocks_that_mostly_differ_are_regions_if_they_are_no_container_of_torch() -> None:
    with torch.device("meta"):
        (found,) = zoo.find_regions(torchvision.models.resnet18()).regions
    assert (found.name, len(found.modules), found.graphs_needed) == ("BasicBlock", 8, 7)


class Wrapper(Wired):
    """A block that holds one more layer beside another kind of block."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(x))


def test_a_class_is_a_region_where_it_stands_alone_and_one_with_nothing_to_multiply_is_none() -> None:
    model = Sequence(*(Block(4) for _ in range(10)), *(Wrapper(inner=Block(4)) for _ in range(2)))
    report = zoo.find_regions(model)
    (block,) = [found for found in report.regions if found.name == "Block"]
    assert {f"blocks.{index}" for index in range(10)} <= set(block.modules), str(report)
    x = torch.randn(2, 4)
    expected = model(x)
    zoo.compile_regions(model, backend="eager")
    torch.testing.assert_close(model(x), expected)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).relu()

    report = zoo.find_regions(Sequence(*(Scale() for _ in range(12))))
    assert not report.regions and "no block repeats: no class but those of torch.nn occurs" in str(report)
    # Layers whose widths mostly differ: nearly as many graphs as there are layers.
    report = zoo.find_regions(Sequence(*(Block(width) for width in (2, 2, 3, 4, 5, 6, 7, 8))))
    assert not report.regions and "its repeated blocks (Block) are too small" in str(report)


def test_models_inside_a_model_bring_their_regions_and_the_rest_is_discovered() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gnn, self.body = zoo.create("gcn-debug"), Sequence(*(Block(5) for _ in range(8)))
            self.towers = nn.ModuleList(zoo.create("resnet-debug") for _ in range(2))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.body(self.gnn(x, edges)).mean(0)

    x, edges = torch.randn(9, 12), torch.randint(9, (2, 20))
    model = Net().eval()
    with torch.no_grad():
        expected = model(x, edges)
        found = {each.name: len(each.modules) for each in zoo.find_regions(model).regions}
        assert found == {"GNNLayer": 3, "Stem": 2, "Bottleneck": 12, "ResNetHead": 2, "Block": 8}
        zoo.compile_regions(model, backend="eager")
        with zoo.enforce_budget(model):
            torch.testing.assert_close(model(x, edges), expected)
        zoo.uncompile(model)
        zoo.compile_regions(model.gnn, backend="eager")
        with pytest.raises(ValueError, match="zoo.compile_regions was called on its part gnn"):
            zoo.warm_up(model, x, edges)


def test_blocks_that_share_a_module_are_named_as_the_reason() -> None:
    shared = nn.Linear(4, 4)
    model = Sequence(*(Wired(inner=shared) for _ in range(4)))
    with pytest.raises(ValueError, match=r"share a module \(blocks\.1\.inner\) .* name their class in regions"):
        zoo.compile_regions(model)


def test_a_default_that_is_given_is_no_other_input() -> None:
    class Masked(Wired):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.linear(x) if mask is None else self.linear(x) * mask

    class Half(Sequence):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x, mask=None))

    model, x = Half(Masked(), Masked()).eval(), torch.randn(2, 4)
    with torch.no_grad():
        assert zoo.find_regions(model, [Masked], args=(x,)).graphs == "1"
        assert zoo.warm_up(zoo.compile_regions(model, regions=[Masked], backend="eager"), x).graphs == 1


def test_the_order_of_a_dict_is_told_as_what_differs() -> None:
    class Summing(Wired):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: self.linear(each) for name, each in reversed(x.items())}

    report = zoo.find_regions(
        nn.Sequential(Summing(), Summing()), [Summing], args=({"a": torch.randn(2, 4), "b": torch.randn(2, 4)},)
    )
    assert report.graphs_needed == 2
    assert "a dict whose entries are in another order" in str(report)


@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_may_share_a_module_without_weights(blocks: int) -> None:
    class Scale(nn.Module):
        factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    class Scaled(Wired):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.last(self.linear(x)))

    scale, x = Scale(), torch.randn(2, 4)
    model = Sequence(*(Scaled(last=nn.Linear(4, 4), inner=scale) for _ in range(blocks))).eval()
    with torch.no_grad():
        assert zoo.find_regions(model, kwargs={"x": x}).graphs == "1"
        assert type(scale) is Scale
        assert zoo.warm_up(zoo.compile_regions(model, backend="eager"), x).graphs == 1


class Holding(Wired):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held(self) if callable(held) else held

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if callable(self.held):
            return self.held(x)
        return x * (self.held["scale"] if isinstance(self.held, dict) else self.held.scale)


def scaling(scale: float) -> Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]:
    return lambda _: lambda x: x * scale


class Computing(Block):
    """Computes something from its index."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(super().forward(x), self.index)


def computing(compute: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[int], nn.Module]:
    return lambda index: Computing(index=index, compute=compute)


# A block by its index, the prediction for four of them, and the graphs that they need.
PREDICTIONS: dict[str, tuple[Callable[[int], nn.Module], str, int]] = {
    "lambdas": (lambda _: Holding(scaling(2.0)), "1", 1),
    "lambdas that close over a value of their own": (lambda index: Holding(scaling(float(index))), "4", 4),
    "bound methods": (lambda _: Holding(lambda block: block.double), "1", 1),
    "dicts": (lambda _: Holding({"scale": 2.0}), "1", 1),
    "dicts that differ": (lambda index: Holding({"scale": float(index)}), "at least 1", 4),
    "objects": (lambda _: Holding(SimpleNamespace(scale=2.0)), "1", 1),
    "objects that differ": (lambda index: Holding(SimpleNamespace(scale=float(index))), "at least 1", 4),
    "partial functions": (lambda _: Holding(lambda _: partial(torch.mul, other=2.0)), "1", 1),
    "ints": (computing(lambda x, index: x * index + index // 2), "1", 1),
    "a rate": (computing(lambda x, index: nn.functional.dropout(x, index / 10)), "at least 1", 4),
    "a scale": (computing(lambda x, index: x * (0.5 * index)), "at least 1", 1),
    "a branch": (computing(lambda x, index: x.neg() if index < 2 else x), "at least 1", 2),
    "floats of numpy": (lambda index: IndexedBlock(index=np.float64(index)), "at least 1", 1),
    "integers of numpy": (lambda index: IndexedBlock(index=np.int64(index)), "1", 1),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_are_the_compilers_count_or_say_that_they_are_a_lower_bound(name: str) -> None:
    make, said, needed = PREDICTIONS[name]
    model, x = Sequence(*map(make, range(4))).eval(), torch.randn(2, 4)
    regions = [type(model.blocks[0])]
    with torch.no_grad():
        assert zoo.find_regions(model, regions, kwargs={"x": x}).graphs == said
        # What a block computes by its index only a call shows.
        assert zoo.find_regions(model, regions).graphs in (str(needed), "at least 1")
        zoo.compile_regions(model, regions=regions, backend="eager")
        model(x)
    assert sum(graphs_of(model).values()) == needed


def test_predictions_in_training_know_what_requires_a_gradient() -> None:
    model, x = Sequence(*(Block(4) for _ in range(4))), torch.randn(2, 4)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    report = zoo.find_regions(model, [Block], kwargs={"x": x})
    zoo.compile_regions(model, regions=[Block], backend="eager")
    model(x).sum().backward()
    # Frozen blocks, the first that is trained, and those whose input requires a gradient.
    assert report.graphs_needed == sum(graphs_of(model).values()) == 3


class Place(enum.IntEnum):
    FIRST = 1
    SECOND = 2


def test_a_hook_inside_a_block_has_a_graph_and_a_hook_of_the_block_runs_outside_of_it() -> None:
    model, x = nn.Sequential(*(Core() for _ in range(4))).eval(), torch.randn(2, 8)
    model[2].up.register_forward_hook(lambda module, given, out: out * 1.5)
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, given, out: seen.update({name: out.detach()})

    for name, block in model.named_children():
        block.register_forward_hook(keep(name))
    assert zoo.find_regions(model).graphs == "2"
    expected = model(x)
    kept, seen = seen, {}
    zoo.compile_regions(model, backend="eager")
    with torch.no_grad(), zoo.enforce_budget(model):
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(seen, kept)
    assert sum(graphs_of(model).values()) == 2


def test_hooks_of_one_function_are_a_graph_for_all_blocks() -> None:
    # The hooks by which transformers collects hidden states stay in the model.
    model, kwargs = MODELS["transformers Llama"].make().eval(), {"input_ids": torch.arange(3, 9)[None]}
    with torch.no_grad():
        expected = model(**kwargs, output_hidden_states=True).hidden_states
        assert zoo.find_regions(model, kwargs=kwargs).graphs == "1"
        zoo.compile_regions(model, backend="eager")
        if torch.__version__ < "2.12":  # whose Dynamo cannot trace what such a hook asks
            with pytest.raises(zoo.RegionError, match="context_var.*exclude="):
                model(**kwargs, output_hidden_states=True)
            return
        with zoo.enforce_budget(model):
            seen = model(**kwargs, output_hidden_states=True).hidden_states
    torch.testing.assert_close(seen, expected)
    assert sum(graphs_of(model).values()) == 1


def test_a_hook_inside_a_region_that_costs_graphs_or_cannot_be_traced_is_named_with_the_remedy() -> None:
    kept: list[Tensor] = []

    def collect(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)

    def interrupt(module: nn.Module, args: Any, output: Tensor) -> None:
        torch._dynamo.graph_break()

    model, x = Sequence(*(Wrapper(inner=Block(4)) for _ in range(6))), torch.randn(2, 4)
    with torch.no_grad():
        for hook, told in ((collect, pytest.warns(zoo.RegionWarning)), (interrupt, pytest.raises(zoo.RegionError))):
            torch.compiler.reset()
            handles = [block.inner.register_forward_hook(hook) for block in model.blocks]
            with told as said:
                zoo.compile_regions(model, backend="eager")(x)
            message = str(said.value if hook is interrupt else said[0].message)
            assert message.endswith("if its own module is the region: regions=['blocks.*.inner', ...]")
            zoo.uncompile(model)
            zoo.compile_regions(model, regions=["blocks.*.inner"], backend="eager")(x)
            assert graphs_of(model) == {"Block": 1}
            zoo.uncompile(model)
            for handle in handles:
                handle.remove()


class Refining(Sequence):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for _ in range(5):
            x = self.core(x)
        return x


class Core(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Broken(IndexedBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x * (self.index + 1)


class Configured(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config["scale"]


@pytest.mark.parametrize(
    ("blocks", "fullgraph", "graphs", "said"),
    [
        # The rest after a graph break is no second graph of a block.
        (lambda: (Broken(index=place) for place in Place), False, 2, r"blocks\.1, where one would do"),
        (lambda: (Configured(config={"scale": scale}) for scale in range(2, 10)), True, 5, r".*config\['scale'\] == 4"),
    ],
)
def test_a_graph_for_each_block_is_warned_of_once_with_its_reason(blocks, fullgraph, graphs, said):
    model = zoo.compile_regions(Sequence(*blocks()), backend="eager", fullgraph=fullgraph)
    warned = pytest.warns(zoo.RegionWarning, match=rf"{graphs} graphs compiled for blocks\.0, {said}")
    with warned as caught, torch.no_grad():
        model(torch.randn(2, 4))
    assert len(caught) == 1


class Shrinking(Sequence):
    """Gives each block fewer rows than the one before."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[1:]
        return x


@pytest.mark.parametrize("given", [False, True])
def test_a_graph_for_each_shape_is_warned_of_with_what_finds_better_regions(given: bool) -> None:
    model, x = Shrinking(*(Block(4) for _ in range(MANY_SHAPES))), torch.randn(MANY_SHAPES + 1, 4)
    zoo.compile_regions(model, args=(x,) if given else (), backend="eager")
    with torch.no_grad(), pytest.warns(zoo.RegionWarning, match="16 graphs, one for each shape") as caught:
        model(x)
    (said,) = [str(each.message) for each in caught]
    assert ("with the inputs of a call" in said) is not given and "dynamic=True" in said


@pytest.mark.parametrize("given", [False, True])
def test_a_graph_for_each_module_is_warned_of_unless_the_report_has_said_so(given: bool) -> None:
    model, x = Shrinking(*(Block(4) for _ in range(6))), torch.randn(8, 4)
    zoo.compile_regions(model, args=(x,) if given else (), backend="eager")
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert zoo.warm_up(model, x).graphs == 6
    said = "each of 6 modules of Block has compiled a graph of its own, where 1 would do"
    assert [said in str(each.message) for each in caught] == ([] if given else [True])


class Remembering(Wired):
    """Keeps what its first call computed, as LeViT's attention does its biases."""

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self.kept:
            self.kept["scale"] = x.mean()
        return self.linear(x) * self.kept["scale"]


def test_a_recompiled_block_names_the_graph_that_did_not_serve() -> None:
    model, x = Sequence(*(Remembering(width, kept={}) for width in (4, 4, 5, 5))), torch.randn(2, 4)
    model.blocks.insert(2, nn.Linear(4, 5))
    zoo.compile_regions(model.eval(), backend="eager")
    with torch.no_grad():
        assert zoo.warm_up(model, x).graphs == 2
        with pytest.raises(zoo.BudgetError) as raised, zoo.enforce_budget(model):
            model(x)
    first, second = raised.value.violations
    # Dynamo's reason is why the newest graph, of the other width, did not serve.
    assert "blocks.0" in first and "TORCH_LOGS=recompiles shows why graph 0/0 did not serve" in first
    assert "blocks.3" in second and "TORCH_LOGS=recompiles shows why graph 0/1 did not serve" in second


def test_budgets_hold_for_any_entry_point() -> None:
    coder = nn.ModuleDict({name: nn.Sequential(Block(4), Block(4)) for name in ("encoder", "decoder")}).eval()
    zoo.compile_regions(coder, backend="eager", dynamic=False)
    with torch.no_grad(), zoo.enforce_budget(coder):
        for batch in (2, 3, 4):
            coder["decoder"](torch.randn(batch, 4))


HOOKS: list[tuple[Callable[[Any], Any], int]] = [
    (lambda model: add_hook_to_module(model.transformer_blocks[1].attn, AlignDevicesHook(io_same_device=True)), 1),
    (lambda model: model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32), 2),
    (lambda model: model.enable_cache(FirstBlockCacheConfig(threshold=0.1)), 2),
]


@pytest.mark.parametrize(("hook", "hooked"), HOOKS, ids=["offloaded", "cast by layer", "cached"])
def test_hooks_of_the_library_are_obstacles(hook: Callable[[Any], None], hooked: int) -> None:
    model = MODELS["diffusers FluxTransformer2DModel"].make().eval()
    assert not zoo.find_regions(model).obstacles
    hook(model)
    found = zoo.find_regions(model).obstacles
    assert len(found) == hooked and all("have hooks of accelerate or diffusers" in each.message for each in found)


PAGE = rows_of((Path(__file__).resolve().parents[1] / "docs/conformance.md").read_text(encoding="utf-8"))
MEASURED = [
    "transformers Albert", "transformers ModernBert", "transformers OPT", "transformers Llama, static cache",
    "transformers Wav2Vec2", "transformers CLIP", "diffusers UNet2DConditionModel", "diffusers AutoencoderKL",
    "diffusers FluxTransformer2DModel", "torchvision VisionTransformer", "torchvision SwinTransformer",
    "torch_geometric GIN",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_each_loss_on_the_page_has_its_reason_and_each_reason_a_loss(name: str) -> None:
    assert PAGE[name].split(" | ")[-1] == f"{MODELS[name].why} |"
    assert bool(losses(PAGE[name])) == bool(MODELS[name].why), losses(PAGE[name])


def graphs(line: str) -> list[str]:
    """Regions, their share, predictions and our graphs; operations differ from release to release."""
    cells = line.split(" | ")
    return [*cells[:4], *(re.sub(r" \(.*", "", cell) for cell in cells[4:8])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MEASURED)
def test_the_page_is_what_is_counted(name: str) -> None:
    expected = graphs(PAGE[name])
    if name == "torchvision VisionTransformer" and compat._TORCH < compat.ATTENTION_KEEPS_STRIDES:
        # The attention of the first block returns other strides than its input has.
        expected[3:6] = ["2, 2", "zoo 2", "zoo 4"]
    assert graphs(row(name, [OURS])) == expected
