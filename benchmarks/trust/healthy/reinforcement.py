"""Reinforcement learning on a walk along ten places: the reward is at the far end."""

import copy
import random
from collections import deque

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import mlp
from benchmarks.trust.training import Training

PLACES, LONGEST = 8, 24


def _see(places: Tensor) -> Tensor:
    return F.one_hot(places, PLACES).float()


def _walk(places: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Where each walker is next, and its reward: 1 at the far end, a little at the near one."""
    places = (places + 2 * actions - 1).clamp(0, PLACES - 1)
    return places, (places == PLACES - 1).float() + 0.05 * (places == 0)


def _episodes(choose: object, count: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Places, actions and rewards of so many walks."""
    places = torch.randint(PLACES // 2, (count,))
    seen, acted, gained = [], [], []
    for _ in range(LONGEST):
        actions = choose(places)  # type: ignore[operator]
        seen.append(places)
        acted.append(actions)
        places, reward = _walk(places, actions)
        gained.append(reward)
    return torch.stack(seen), torch.stack(acted), torch.stack(gained)


def _returns(rewards: Tensor, discount: float = 0.9) -> Tensor:
    total, found = torch.zeros_like(rewards[0]), []
    for reward in rewards.flip(0):
        total = reward + discount * total
        found.append(total)
    return torch.stack(found[::-1])


@healthy("policy-gradient", held_back=True, learns=0.6)
def policy_gradient(run: Training) -> None:
    """Actions that were followed by reward become likelier; what is missed of the best reward must fall."""
    model = mlp(PLACES, 32, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    for _ in range(200):
        with torch.no_grad():
            places, actions, rewards = _episodes(
                lambda p: torch.distributions.Categorical(logits=model(_see(p))).sample()
            )
        returns = _returns(rewards)
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        with run.forward():
            chances = model(_see(places)).float().log_softmax(-1)
            loss = -(chances.gather(-1, actions[..., None]).squeeze(-1) * advantage).mean()
        run.step(loss, optimizer)
        run.measures.append(LONGEST - float(rewards.sum(dim=0).mean()))


@healthy("actor-critic", learns=0.6)
def actor_critic(run: Training) -> None:
    """A policy and a value of places on one trunk, with a bonus for entropy."""
    trunk, actor, critic = mlp(PLACES, 32, 32, act=nn.Tanh), nn.Linear(32, 2), nn.Linear(32, 1)
    model = nn.ModuleDict({"trunk": trunk, "actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.watch(model, optimizer)
    for _ in range(200):
        with torch.no_grad():
            policy = lambda p: torch.distributions.Categorical(logits=actor(trunk(_see(p)).tanh())).sample()  # noqa: E731
            places, actions, rewards = _episodes(policy)
        returns = _returns(rewards)
        with run.forward():
            h = trunk(_see(places)).tanh()
            chances, value = actor(h).float().log_softmax(-1), critic(h).float().squeeze(-1)
            advantage = (returns - value).detach()
            chosen = chances.gather(-1, actions[..., None]).squeeze(-1)
            entropy = -(chances.exp() * chances).sum(dim=-1).mean()
            loss = -(chosen * advantage).mean() + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy
        run.step(loss, optimizer, clip=0.5)
        run.measures.append(LONGEST - float(rewards.sum(dim=0).mean()))


def _q_learning(run: Training, *, copied: int, steps: int, dense: bool) -> None:
    online = mlp(PLACES, 48, 48, 2)
    target = copy.deepcopy(online)
    model = nn.ModuleDict({"online": online, "target": target.requires_grad_(False)})
    optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    kept: deque[tuple[int, int, int, float]] = deque(maxlen=2000)
    place, gained = 0, 0.0
    for step in range(steps):
        for _ in range(4):
            eager = random.random() > max(0.1, 1 - step / (steps / 2))
            with torch.no_grad():
                best = int(online(_see(torch.tensor(place))).argmax())
            action = best if eager else random.randrange(2)
            after, reward = _walk(torch.tensor(place), torch.tensor(action))
            reward = reward if dense else (after == PLACES - 1).float() * 1.0
            kept.append((place, action, int(after), float(reward)))
            gained += float(reward)
            place = 0 if int(after) == PLACES - 1 else int(after)
        run.measures.append(4 / 3 - gained)
        gained = 0.0
        rows = random.choices(kept, k=32)
        places, actions, nexts, rewards = (torch.tensor(column) for column in zip(*rows, strict=True))
        with run.forward():
            said = online(_see(places)).float().gather(-1, actions[:, None]).squeeze(-1)
            with torch.no_grad():
                wanted = rewards + 0.9 * target(_see(nexts)).float().amax(dim=-1)
            loss = F.smooth_l1_loss(said, wanted)
        run.step(loss, optimizer)
        if step % copied == copied - 1:
            target.load_state_dict(online.state_dict())


@healthy("dqn-target-copies", learns=0.75)
def dqn(run: Training) -> None:
    """Q-learning with a target network that is copied every fifty steps: the loss jumps at each copy."""
    _q_learning(run, copied=50, steps=400, dense=True)


@healthy("sparse-rewards", held_back=True, learns=0.75)
def sparse(run: Training) -> None:
    """Rewards that are seldom: at first hardly any loss, then some; the copy follows often."""
    _q_learning(run, copied=20, steps=400, dense=False)


@healthy("bandit", learns=0.6)
def bandit(run: Training) -> None:
    """A contextual bandit whose every second reward is missing: many losses are exactly zero."""
    model = mlp(8, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.watch(model, optimizer)
    right = torch.randn(8, 4)
    for _ in range(300):
        x = torch.randn(8, 8)
        with run.forward():
            chances = model(x).float().log_softmax(-1)
            actions = chances.exp().detach().multinomial(1)
            best = (x @ right).argmax(dim=-1, keepdim=True)
            reward = (actions == best).float() * (torch.rand(()) < 0.5)
            loss = -(chances.gather(-1, actions) * reward).mean()
        run.step(loss, optimizer)
        run.measures.append(float((actions != best).float().mean()))
