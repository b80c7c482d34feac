"""Budgets: every way to be slow in silence is a violation with a name."""

import re
from collections.abc import Callable

import pytest
import torch
from blocks import MODES, Block, Disabled, Sequence, Stack
from torch import Tensor, nn

import zoo
from zoo import BudgetError, Region


def compiled(model: nn.Module, **kwargs: object) -> nn.Module:
    return zoo.compile_regions(model, backend="eager", **kwargs)


def violations(model: nn.Module, *calls: Callable[[], object]) -> list[str]:
    with pytest.raises(BudgetError) as caught, zoo.enforce_budget(model):
        for call in calls:
            call()
    return caught.value.violations


def test_budgets_hold_for_each_mode_and_each_shape_apart() -> None:
    model = compiled(Stack())
    with zoo.enforce_budget(model):
        for context in MODES.values():
            for training in (True, False):
                for batch in (2, 3):
                    with context():
                        model.train(training)(torch.randn(batch, 4))


def test_an_eager_model_has_no_budget() -> None:
    with pytest.raises(ValueError, match=r"call zoo\.compile_regions"), zoo.enforce_budget(Stack()):
        pass


def test_over_budget_names_the_region_the_mode_and_the_reason() -> None:
    class Odd(Stack):
        """The same block meets two shapes in one call: two graphs where one was declared."""

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](self.stem(x))
            return self.blocks[2](self.blocks[1](x.repeat(2, 1)))

    model = compiled(Odd().eval())
    (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    assert "Block: 2 graphs in mode eval, grad, budget 1" in violation and "blocks.1" in violation
    assert "size mismatch" in violation


class NamedBlock(Block):
    """Reads a string of its own: a graph a layer."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__(width)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(self.name)


@pytest.mark.filterwarnings("ignore:.*where one would do:zoo.RegionWarning")
def test_a_graph_a_layer_is_over_budget_at_run_time_too() -> None:
    blocks = Sequence(*(NamedBlock(4, "b" * i) for i in range(1, 4)))
    with pytest.warns(zoo.RegionWarning):
        model = compiled(blocks, regions=[Region(NamedBlock, graphs=1)])
    found = violations(model, lambda: model(torch.randn(2, 4)))
    assert "3 graphs" in found[0] and "budget 1" in found[0]


def test_a_region_without_a_budget_has_a_graph_for_each_structure() -> None:
    model = compiled(Sequence(*(NamedBlock(width, "b" * i) for i, width in ((1, 4), (1, 4)))), regions=[NamedBlock])
    with torch.no_grad(), zoo.enforce_budget(model):
        model(torch.randn(2, 4))
    model = compiled(Sequence(*(NamedBlock(4, "c" * i) for i in (5, 6))), regions=[NamedBlock])
    with torch.no_grad():
        (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    assert "NamedBlock (blocks.1): recompiled" in violation and "name" in violation


def test_a_recompile_of_the_same_kind_is_a_violation() -> None:
    model = compiled(Sequence(Scaled()), regions=[Scaled])

    def change() -> None:
        model.blocks[0]._scale = 2
        model(x)

    x = torch.randn(2, 4)
    found = violations(model, lambda: model(x), change)
    assert any("recompiled" in v and "_scale" in v for v in found), found


@pytest.mark.parametrize("bypass", ["forward", "checkpoint"])
def test_a_bypassed_region_is_a_violation(bypass: str) -> None:
    class Bypass(Sequence):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if bypass == "checkpoint":
                return torch.utils.checkpoint.checkpoint(self.blocks[1].forward, x, use_reentrant=False)
            return self.blocks[1].forward(x)

    model = compiled(Bypass(Block(4), Block(4)).eval())  # in training a layer may be dropped
    (violation,) = violations(model, lambda: model(torch.randn(2, 4)))
    assert "blocks.1" in violation and "never ran" in violation


class Breaking(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break("on purpose")
        return x.relu()


@pytest.mark.parametrize(("cls", "words"), [(Disabled, "ran eagerly"), (Breaking, "graph break.*on purpose")])
def test_what_runs_eagerly_in_whole_or_in_part_is_a_violation(cls: type[nn.Module], words: str) -> None:
    model = compiled(Sequence(cls(4), cls(4)), fullgraph=False)
    found = violations(model, lambda: model(torch.randn(2, 4)))
    assert any(re.search(words, violation, re.DOTALL) for violation in found), found


def test_a_branch_on_data_is_a_graph_break_with_its_line() -> None:
    class Branching(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, width)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if x.sum() > 0:
                x = x + 1
            return x.relu()[..., :4]

    # More compilations than Dynamo remembers by default.
    model = compiled(Sequence(*map(Branching, (4, 4, *range(5, 36)))), regions=[Branching], fullgraph=False)
    found = violations(model, lambda: [model(sign * torch.ones(2, 4)) for sign in (-9, 9)])
    assert any("graph break" in each and "if x.sum() > 0:" in each for each in found), found
    assert not any("recompiled" in each for each in found), found


def test_nothing_run_is_a_violation() -> None:
    assert all("never ran" in violation for violation in violations(compiled(Stack())))


def test_an_error_inside_passes_through() -> None:
    model = compiled(Stack())
    with pytest.raises(KeyError), zoo.enforce_budget(model):
        raise KeyError("mine")
    assert all(m._compiled_call_impl.on_call is None for m in model.blocks)


def test_a_block_that_was_taken_out_is_named() -> None:
    model = zoo.compile_regions(Stack(), backend="eager")
    del model.blocks[2]
    lost = pytest.raises(ValueError, match=r"Stack has lost blocks\.2 since .*zoo\.uncompile\(model\)")
    with lost, zoo.enforce_budget(model):
        pass


class Scaled(nn.Module):
    """Reads a private attribute, which is not part of its signature: changing it is a recompile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._scale = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self._scale


def test_a_recompile_before_the_block_is_not_blamed_on_it() -> None:
    model = zoo.compile_regions(Sequence(Scaled()), regions=[Region(Scaled, graphs=2)], backend="eager")
    x = torch.randn(2, 4)
    model(x)
    model.blocks[0]._scale = 2
    model(x)
    with zoo.enforce_budget(model):
        model(x)


def test_warm_up_counts_its_own_models_graphs_alone() -> None:
    class TeacherBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()

    teacher = zoo.compile_regions(Sequence(TeacherBlock()), regions=[TeacherBlock], backend="eager")

    class Student(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(teacher(x))

    student = zoo.compile_regions(Student().eval(), backend="eager")
    with torch.no_grad():
        cost = zoo.warm_up(student, x=torch.randn(2, 4))
    assert {each.region: each.graphs for each in cost.costs} == {"Block": 1}
