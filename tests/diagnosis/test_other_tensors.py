"""Trainings of other tensors than the watched model's parameters: weights of a call, a student, inputs."""

import itertools
from pathlib import Path

import torch
from torch import nn

import plimsoll as pl
from plimsoll.diagnosis import diagnose
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.trainings import adamw, seeded_mlp

RULES = ["untrained-parameters", "optimizer-idle"]


@each("given", [True, False])
def test_a_model_that_is_called_with_other_parameters_is_a_note(given: bool, tmp_path: Path) -> None:
    model = seeded_mlp()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    with pl.watch(model, optimizer if given else None, run=tmp_path / str(given), every=2):
        for _ in range(12):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            logits = torch.func.functional_call(model, weights, (x,))
            nn.functional.cross_entropy(logits, x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
    (finding,) = diagnose(tmp_path / str(given), rules=RULES)
    assert (finding.rule, finding.severity) == ("optimizer-idle", "info")
    assert finding.evidence == {"cause": "it is called with other parameters"}


@each(("graph", "copies", "frozen"), itertools.product([False, True], repeat=3))
def test_a_teacher_that_is_only_called_is_no_training(graph: bool, copies: bool, frozen: bool, tmp_path: Path) -> None:
    tmp_path /= f"{graph}-{copies}-{frozen}"
    student = seeded_mlp()
    teacher = seeded_mlp().requires_grad_(not frozen)
    optimizer = adamw(student)
    with pl.watch(student, optimizer, run=tmp_path / "student", every=2), pl.watch(teacher, run=tmp_path / "teacher"):
        for i in range(12):
            if copies and i % 4 == 0:
                teacher.load_state_dict(student.state_dict())
            x = torch.randn(16, 8)
            with torch.set_grad_enabled(graph):
                wanted = teacher(x)
            optimizer.zero_grad()
            (student(x) - wanted.detach() + 0.1).square().mean().backward()
            optimizer.step()
    assert diagnose(tmp_path / "teacher", rules=RULES) == diagnose(tmp_path / "student", rules=RULES) == []


@each(("frozen", "given"), itertools.product([False, True], repeat=2))
def test_inputs_that_are_learned_through_a_model_are_no_fault(frozen: bool, given: bool, tmp_path: Path) -> None:
    tmp_path /= f"{frozen}-{given}"
    model, prompt = seeded_mlp().requires_grad_(not frozen), torch.randn(16, 8, requires_grad=True)
    optimizer, printed = torch.optim.Adam([prompt], 1e-2), list[float]()
    with pl.watch(model, optimizer if given else None, run=tmp_path / "run", every=2):
        for _ in range(24):
            optimizer.zero_grad()
            loss = model(prompt).square().mean()
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    if given:
        assert Run(tmp_path / "run").scalars("loss")[1].tolist() == printed
    found = diagnose(tmp_path / "run", rules=RULES)
    causes = [] if frozen else ["other tensors are learned through it"]
    assert [(f.severity, f.evidence["cause"]) for f in found] == [("info", cause) for cause in causes]


def test_a_generator_whose_optimizer_never_steps_is_named(tmp_path: Path) -> None:
    generator, critic = seeded_mlp(), nn.Linear(4, 1)
    optimizer = torch.optim.Adam(critic.parameters())
    with pl.watch(generator, run=tmp_path / "run", every=2):
        for _ in range(12):
            made = generator(torch.randn(16, 8))
            optimizer.zero_grad()
            (critic(made.detach()) - critic(torch.randn(16, 4))).mean().backward()
            optimizer.step()
            critic(made).mean().backward()
    (finding,) = diagnose(tmp_path / "run", rules=RULES)
    assert (finding.severity, finding.evidence["cause"]) == ("alarm", "it has never stepped")
