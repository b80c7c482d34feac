"""What can be compiled, and what stands in its way."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Block, Child, Dropping, IndexedBlock, Sequence, Stack, StoringBlock, declared
from torch import Tensor, nn

import zoo
from zoo import Region
from zoo.engine.signature import mode


def test_declared_regions_are_grouped_by_signature() -> None:
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


def stack_of_sequences() -> nn.Module:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Sequence(Block(4)), Sequence(Block(4))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    return Outer()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *((lambda each=each: zoo.find_regions(Stack(), [each]), TypeError, "nn.Module class") for each in (3, int)),
        (lambda: zoo.find_regions(Stack(), [Block(2)]), TypeError, "nn.Module class"),
        (lambda: zoo.find_regions(Stack(), Block), TypeError, r"regions=\[\.\.\.\]"),
        (lambda: Region(Block, graphs=0), ValueError, "graphs is 0"),
        (
            lambda: zoo.find_regions(Sequence(Child(4)), [Block]),
            ValueError, r"Block matches no module of Sequence; its subclasses \['Child'\]",
        ),
        (
            lambda: zoo.find_regions(stack_of_sequences(), [Sequence, Block]),
            ValueError, r"Block \(blocks\.0\.blocks\.0\) is nested in region Sequence",
        ),
        (
            lambda: zoo.find_regions(Stack(), ["Block"]),
            ValueError, r"regions names 'Block', but Stack has no such module; a path reads as",
        ),
        (lambda: zoo.find_regions(Stack(), exclude=["blocks.7"]), ValueError, r"'blocks\.7'"),
        (lambda: zoo.find_regions(Stack(), exclude="blocks.1"), TypeError, "exclude is .*a list of classes and paths"),
        (lambda: zoo.find_regions(Stack(), exclude=Block), TypeError, "exclude is .*a list of classes and paths"),
    ],
)  # fmt: skip
def test_what_names_no_region_is_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_regions_are_given_and_left_out_by_class_and_by_path() -> None:
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


def test_discovery_takes_the_outermost_repeated_class() -> None:
    assert [found.name for found in zoo.find_regions(stack_of_sequences()).regions] == ["Sequence"]


def test_discovery_passes_over_copies_that_share_nothing() -> None:
    assert not zoo.find_regions(Sequence(Block(2), Block(4), Block(8))).regions


def test_an_index_that_is_read_is_an_obstacle_and_one_that_is_stored_is_not() -> None:
    blocks = [IndexedBlock(4, i) for i in range(5)]
    read = zoo.find_regions(declared(Region(IndexedBlock))(*blocks))
    assert read.graphs_needed == 5
    assert "reads index (in some branch), which differs in every layer (0, 1, 2, 3, ... (5))" in str(read.obstacles[0])
    # Where the model does not declare its regions, it is a symbol.
    symbol = zoo.find_regions(Sequence(*blocks))
    assert symbol.graphs_needed == 1 and not symbol.obstacles
    stored = zoo.find_regions(Sequence(*(StoringBlock(4, i) for i in range(5))))
    assert stored.graphs_needed == 1 and not stored.obstacles


def test_an_inherited_forward_is_an_obstacle() -> None:
    (obstacle,) = zoo.find_regions(Sequence(Child(4), Child(4)), [Child]).obstacles
    assert "inherits forward from Block" in str(obstacle)


def test_inputs_tell_layers_apart_and_find_a_bypass() -> None:
    class Bypass(Sequence):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            x = self.blocks[1](x.repeat(2, 1))
            return self.blocks[2].forward(x)

    model, x = Bypass(Block(4), Block(4), Block(4)).eval(), torch.randn(2, 4)
    report = zoo.find_regions(model, kwargs={"x": x})
    assert zoo.find_regions(model, args=(x,)) == report
    assert report.regions[0].signatures == (("blocks.0", "blocks.2"), ("blocks.1",))
    assert "blocks.2 was not called as a module" in str(report.obstacles[0])


@pytest.mark.parametrize("call", [zoo.find_regions, zoo.compile_regions])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"args": torch.ones(2, 4)}, r"args is a Tensor, expected a tuple of arguments: \(x,\)"),
        ({"args": {"x": 1}}, r"args is a dict, .* or kwargs=\{'x': x\}"),
        ({"kwargs": (1,)}, "kwargs is a tuple, expected a dict of arguments by name"),
        ({"inputs": 3}, "args is a int, expected a tuple"),
        ({"args": (1,), "inputs": (1,)}, "leave inputs= out"),
    ],
)
def test_arguments_in_another_form_are_refused(call: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call(Stack(), **given)


class Doubling(Sequence):
    """Its second block needs a graph of its own, which only a call shows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x).repeat(2, 1))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": torch.ones(2, 4)}, "write kwargs=inputs, where inputs is the same dict"),
        ((torch.ones(2, 4),), "write args=inputs, where inputs is the same tuple"),
        (torch.ones(2, 4), r"write args=\(inputs,\), where inputs is the same Tensor"),
    ],
)
def test_inputs_in_the_old_form_work_with_a_note(inputs: Any, said: str) -> None:
    model = Doubling(Block(4), Block(4)).eval()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("default")
        for _ in range(2):
            assert zoo.find_regions(model, inputs=inputs).graphs_needed == 2
    (note,) = notes  # one for each place that calls it
    assert note.category is DeprecationWarning and note.filename == __file__ and re.search(said, str(note.message))
    with pytest.warns(DeprecationWarning, match=said) as warned:
        zoo.compile_regions(model, inputs=inputs, backend="eager")
    assert warned[0].filename == __file__


def test_mode_in_words() -> None:
    block = Block(2).eval()
    assert mode(block) == "eval, grad"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mode(block) == "eval, no_grad, autocast(cpu:bfloat16)"
    with torch.inference_mode():
        assert mode(block.train()) == "train, inference_mode"


@pytest.mark.gpu
def test_device_share_on_a_gpu() -> None:
    model = Stack(width=512, depth=4).cuda()
    report = zoo.find_regions(model, kwargs={"x": torch.randn(4096, 4, device="cuda")})
    share = report.regions[0].device_share
    assert share is not None and 0.5 < share <= 1.0
    assert "% of device time" in str(report)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@pytest.mark.parametrize("regions", [None, [Lazy]])
def test_parameters_without_a_shape_are_refused_until_they_have_one(regions: list[type[nn.Module]] | None) -> None:
    model = Sequence(Lazy(), Lazy())
    with pytest.raises(ValueError, match=r"region Lazy: blocks\.0\.linear\.weight has no shape .* call the model once"):
        zoo.find_regions(model, regions)
    model(torch.ones(2, 4))
    assert zoo.find_regions(model, regions).graphs_needed == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_torchs() -> None:
    model = nn.ModuleList([Stack(), torch.jit.script(nn.Linear(4, 4)), torch.jit.script(nn.Linear(4, 4))])
    assert [found.name for found in zoo.find_regions(model).regions] == ["Block"]


class Counting(nn.Module):
    """Replaces a buffer, and makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, self.seen.new_ones(1)])
        self.last = x.mean()
        return self.linear(x)


def test_observing_a_model_in_training_leaves_it_as_it_was() -> None:
    model = Sequence(Dropping(4), Dropping(4), Counting()).train()
    before, seen = {k: v.clone() for k, v in model.state_dict().items()}, model.blocks[2].seen
    state = torch.get_rng_state()
    zoo.find_regions(model, [Dropping, Counting], kwargs={"x": torch.ones(8, 4)})
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state) and type(model.blocks[0]) is Dropping
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


class Tower(nn.Module):
    """A stack: its copies are no regions, its blocks are."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Mlp() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_equal_towers_are_cut_into_their_blocks() -> None:
    (found,) = zoo.find_regions(Sequence(Tower(6), Tower(6))).regions
    assert found.name == "Mlp" and len(found.modules) == 12 and found.graphs_needed == 1


class Wrapper(nn.Module):
    """A block that holds one more layer beside another kind of block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


def test_a_class_is_a_region_where_it_stands_alone_as_well() -> None:
    model = Sequence(*(Block(4) for _ in range(10)), Wrapper(), Wrapper())
    report = zoo.find_regions(model)
    (block,) = [found for found in report.regions if found.name == "Block"]
    assert {f"blocks.{index}" for index in range(10)} <= set(block.modules), str(report)
    x = torch.randn(2, 4)
    expected = model(x)
    zoo.compile_regions(model, backend="eager")
    torch.testing.assert_close(model(x), expected)


def test_one_layer_with_nothing_to_multiply_is_no_region() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).relu()

    report = zoo.find_regions(Sequence(*(Scale() for _ in range(12))))
    assert not report.regions and "no regions: no module class but layers of torch.nn occurs twice" in str(report)
    # Layers whose widths mostly differ: nearly as many graphs as there are layers.
    report = zoo.find_regions(Sequence(*(Block(width) for width in (2, 2, 3, 4, 5, 6, 7, 8))))
    assert not report.regions and "what repeats in it (Block) is too little" in str(report)


def test_layers_that_share_a_number_are_no_graph_a_layer() -> None:
    model = Sequence(*(IndexedBlock(4, index) for index in (0, 1, 1)))
    report = zoo.find_regions(model, [IndexedBlock])
    assert report.graphs_needed == 2 and report.obstacles == ()
