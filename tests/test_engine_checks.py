"""Checks of the engine that only show in unusual calls: whose graphs are counted, and what tells two calls apart."""

from __future__ import annotations

import pytest
import torch
from blocks import Block, IndexedBlock, Sequence, Stack
from torch import Tensor, nn

import zoo
from zoo import BudgetError, Region


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


def test_a_region_of_another_structure_does_not_count_as_compiled() -> None:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x - torch.relu(self.linear(x))

    zoo.compile_regions(Sequence(Own(4)), regions=[Own], backend="eager")(torch.randn(2, 4))
    model = Sequence(Own(8))
    model.blocks[0].forward = torch.compiler.disable(model.blocks[0].forward)
    zoo.compile_regions(model, regions=[Own], backend="eager", fullgraph=False)
    with pytest.raises(BudgetError, match=r"Own \(blocks\.0\).* ran eagerly"), zoo.enforce_budget(model):
        model(torch.randn(2, 8))


def test_an_inference_tensor_is_another_kind_of_input() -> None:
    model = zoo.compile_regions(Sequence(Block(4)), regions=[Region(Block, graphs=1)], backend="eager")
    plain = torch.randn(2, 4)
    with torch.inference_mode():
        inference = torch.randn(2, 4)
    with zoo.enforce_budget(model), torch.no_grad():
        model(plain)
        model(inference)


def test_layers_that_share_a_number_are_no_graph_a_layer() -> None:
    model = Sequence(*(IndexedBlock(4, index) for index in (0, 1, 1)))
    report = zoo.find_regions(model, [IndexedBlock])
    assert report.graphs_needed == 2 and report.obstacles == ()


def test_a_bucket_is_not_added_once_weights_have_moved() -> None:
    model = Stack().eval()
    with torch.no_grad():
        step = zoo.cuda_graph(model, (torch.randn(2, 4),))
        model.stem.weight = nn.Parameter(model.stem.weight.clone())
        with pytest.raises(RuntimeError, match=r"stem\.weight was moved or replaced"):
            step.add_bucket((torch.randn(3, 4),))
