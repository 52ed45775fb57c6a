"""Data made by code from recent weights: the next round of games is played while one is trained on.

The updates are in order: both loops play round `n + 1` with the weights after round `n - 1`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from common import compare, descend

import twinbuf as tb

ROUNDS, GAMES, LENGTH = 20, 256, 24


class Players:
    """Plays with a copy of the weights. The simulator takes its time, as another process would."""

    def __init__(self) -> None:
        self.weights = np.zeros((8, 4), np.float32)

    def play(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        random = np.random.default_rng(number)
        states = np.empty((LENGTH, GAMES, 8), np.float32)
        moves = np.empty((LENGTH, GAMES), np.int64)
        states[0] = random.standard_normal((GAMES, 8), np.float32)
        for turn in range(LENGTH):
            noise = random.gumbel(size=(GAMES, 4)).astype(np.float32)
            moves[turn] = (states[turn] @ self.weights + noise).argmax(axis=1)
            time.sleep(0.001)
            if turn + 1 < LENGTH:
                states[turn + 1] = np.roll(states[turn], 1, axis=1) + 0.1 * moves[turn][:, None]
        rewards = (moves == (states[:, :, :4]).argmax(axis=2)).astype(np.float32)
        return torch.from_numpy(states), torch.from_numpy(moves), torch.from_numpy(rewards)


class Model:
    """A policy of one layer, and many passes over each round."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = torch.nn.Linear(8, 4, bias=False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 1e-3)

    def publish(self, players: Players) -> None:
        players.weights = self.policy.weight.detach().numpy().T.copy()

    def learn(self, states: torch.Tensor, moves: torch.Tensor, rewards: torch.Tensor) -> float:
        for _ in range(12):
            chosen = self.policy(states).log_softmax(2).gather(2, moves[..., None]).squeeze(2)
            loss = descend(self.optimizer, -(chosen * (rewards - rewards.mean())).mean())
        return loss


def in_turn(model: Model, players: Players) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    model.publish(players)
    games = players.play(0)
    for number in range(1, ROUNDS):
        model.publish(players)
        later = players.play(number)
        yield games
        games = later
    yield games


def plain() -> list[float]:
    model, players, losses = Model(), Players(), []
    for games in in_turn(model, players):
        losses.append(model.learn(*games))
    return losses


def changed() -> list[float]:
    model, players, losses = Model(), Players(), []
    rounds = tb.generate(players.play, before=lambda _: model.publish(players), rounds=ROUNDS)  # changed
    for games in tb.watch(rounds, name="games"):  # changed
        losses.append(model.learn(*games))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    compare(plain, changed)


if __name__ == "__main__":
    main()
