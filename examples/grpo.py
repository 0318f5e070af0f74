"""GRPO on a byte-level task: ranks train a small GPT, and another process samples with the weights that they publish.

    python examples/grpo.py --ranks 2
    python examples/grpo.py --ranks 2 --off-policy

The prompt is "0", "a" or "A", and a text is rewarded with the share of its bytes that are of the same kind: digits,
small or capital letters. In each round the ranks publish their weights (``spmd.publish``); the sampler loads them
(``spmd.subscribe``), draws a group of texts for each prompt and scores them; and the ranks take a step on their rows of
all, compiled as one program. With ``--off-policy`` that is on the texts of the version before, while the next ones are
drawn. Rewards are those of one device, for any number of ranks that divides the rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import gpt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import spmd

KINDS = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
PROMPTS, GROUP, LENGTH = 12, 8, 8  # of each round; texts of each prompt; bytes of a text
CONFIG = gpt.Config(width=32, layers=1, heads=2, context=1 + LENGTH, vocabulary=128)
CLIP, RATE = 0.2, 0.01


@dataclass(frozen=True)
class Texts:
    """Texts behind their prompts, (rows, 1 + LENGTH): the policy's log-probability of each byte, and its advantage."""

    tokens: Tensor
    log_probabilities: Tensor  # (rows, LENGTH)
    advantages: Tensor  # (rows,)
    reward: float  # the mean

    def part(self, index: int, count: int) -> Texts:
        """The rows of one rank."""
        each = (self.tokens, self.log_probabilities, self.advantages)
        return Texts(*(tensor.chunk(count)[index].clone() for tensor in each), self.reward)


def build() -> nn.Module:
    """The policy, in double precision: so that few bytes depend on the number of ranks."""
    torch.manual_seed(0)
    return gpt.GPT(CONFIG).double()


# Sampling


@torch.no_grad()
def sample(model: nn.Module, k: int) -> Texts:
    """The texts of round ``k``."""
    random = torch.Generator().manual_seed(k)
    kinds = torch.randint(len(KINDS), (PROMPTS,), generator=random).repeat_interleave(GROUP)
    prompts = [KINDS[kind][0] for kind in kinds.tolist()]
    tokens, found = torch.tensor(prompts)[:, None], []
    for _ in range(LENGTH):
        scores = model(tokens)[:, -1].log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=random)
        found.append(scores.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    rewards = score(tokens[:, 1:], kinds)
    groups = rewards.view(PROMPTS, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return Texts(tokens, torch.cat(found, dim=1), advantages.flatten(), rewards.mean().item())


def score(texts: Tensor, kinds: Tensor) -> Tensor:
    """The share of the bytes of each text that are of its kind."""
    members = torch.zeros(len(KINDS), CONFIG.vocabulary).double()
    for kind, each in enumerate(KINDS):
        members[kind, list(each)] = 1
    return members[kinds[:, None], texts].mean(1)


def sampler(to: str, address: Path, ranks: int) -> None:
    """Serve the ranks: for each version that all of them ask for, sample with it, and send each its rows."""
    model = build()
    with Listener(str(address), family="AF_UNIX") as listener:
        accepted = [listener.accept() for _ in range(ranks)]
        by_rank: dict[int, Connection] = {connection.recv(): connection for connection in accepted}
        weights = spmd.subscribe(to)
        while version := {connection.recv() for connection in by_rank.values()}.pop():
            loaded = weights.load(model, after=version - 1)
            assert loaded == version, "nobody publishes before the texts are there"
            texts = sample(model, version)
            for rank, connection in by_rank.items():
                connection.send(vars(texts.part(rank, ranks)))


# Training


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, before: Tensor, a: Tensor) -> Tensor:
    """One step of GRPO: advantages of a group in place of a critic, and a clipped ratio of probabilities."""
    scores = model(tokens[:, :-1]).log_softmax(-1)
    now = scores.gather(2, tokens[:, 1:, None]).squeeze(2)
    ratio = (now - before).exp()
    loss = -torch.minimum(ratio * a[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * a[:, None]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(rank: int, ranks: int, to: str, address: Path, steps: int, off_policy: bool) -> list[float]:
    """Train one rank's rows; returns the mean reward of the texts of each version."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"))
    connection, rewards, waiting = connect(address), list[float](), list[Texts]()
    connection.send(rank)
    for _ in range(steps):
        version = spmd.publish(model, to=to).version
        connection.send(version)
        if off_policy and waiting:  # while the sampler draws
            learn(step, model, optimizer, waiting.pop())
        texts = Texts(**connection.recv())
        rewards.append(texts.reward)
        waiting.append(texts)
        if not off_policy:
            learn(step, model, optimizer, waiting.pop())
    connection.send(0)
    return rewards


def learn(step: spmd.CompiledStep, model: nn.Module, optimizer: torch.optim.Optimizer, texts: Texts) -> None:
    """A step on the texts of this rank."""
    step(model, optimizer, texts.tokens, texts.log_probabilities, texts.advantages)


def connect(address: Path) -> Connection:
    """A connection to the sampler, which may not be there yet."""
    for _ in range(600):
        try:
            return Client(str(address), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.1)
    raise TimeoutError(f"no sampler came to {address} within 60 s")


# Processes


def main() -> None:
    """Start the ranks and the sampler."""
    parser = argparse.ArgumentParser(description="GRPO on a byte-level task.")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--off-policy", action="store_true", help="train on the texts of the version before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        mp.spawn(process, (options.ranks, Path(folder), options.steps, options.off_policy), nprocs=options.ranks + 1)


def process(number: int, ranks: int, folder: Path, steps: int, off_policy: bool) -> None:
    """One process: the last one samples, the others train."""
    torch.set_num_threads(1)
    to, address = folder.name, folder / "sampler"
    if number == ranks:
        return sampler(to, address, ranks)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks)
    start = time.perf_counter()
    rewards = train(number, ranks, to, address, steps, off_policy)
    if number == 0:
        for k in range(0, steps, 5):
            print(f"version {k + 1:3}  reward {rewards[k]:.3f}")
        print(f"version {steps:3}  reward {rewards[-1]:.3f}  ({time.perf_counter() - start:.1f} s)")
    dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main()
