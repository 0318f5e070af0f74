"""The zoo: one small config per architecture of ``transformers``, with the batch that its train step takes.

Nothing is downloaded. Widths are powers of 2 or thrice that, so that a dim that is a multiple of ``ROWS`` counts rows
of the batch (``moves.py`` looks for such). What draws at random is switched off, for the numbers drawn are ours
and not eager's; everything else is as a user trains it, in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 5  # of the batch, on every rank
LENGTH, VOCABULARY = 8, 96

Batch = dict[str, Tensor]
MakeBatch = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Entry:
    """One architecture: ``model`` is a class of transformers, ``config`` the options of its config class.

    ``compares``: whether its loss compares all rows of the batch, so that features of other ranks' rows must come in.
    """

    name: str
    kind: str
    model: str
    batch: MakeBatch
    config: dict[str, Any] = field(default_factory=dict)
    compares: bool = False

    def build(self) -> nn.Module:
        """The model in fp64, without dropout."""
        import transformers  # slow, and not needed to know what there is

        cls = getattr(transformers, self.model)
        model: nn.Module = cls(without_noise(cls.config_class(**self.config)))
        return model.double().train()


def without_noise(config: Any) -> Any:
    """The config with every rate of dropout at zero, in the configs inside it, too."""
    for key, value in vars(config).items():
        if type(value) is float and ("drop" in key or key == "router_jitter_noise"):
            setattr(config, key, 0.0)
        elif hasattr(value, "model_type"):
            without_noise(value)
    return config


def tokens(random: torch.Generator, length: int = LENGTH) -> Tensor:
    """(rows, length) ids; the first few mean padding, ends and masks in some vocabularies, and are left out."""
    return torch.randint(8, VOCABULARY, (ROWS, length), generator=random)


def padding(random: torch.Generator, length: int = LENGTH) -> Tensor:
    """(rows, length) ones, and zeros at the end of most rows: rows differ in length."""
    lengths = torch.randint(length // 2, length + 1, (ROWS, 1), generator=random)
    return (torch.arange(length) < lengths).long()


def text(random: torch.Generator) -> Batch:
    """Ids, a mask, and labels that leave padding out, so that ranks count unequally many tokens."""
    ids, mask = tokens(random), padding(random)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def masked_text(random: torch.Generator) -> Batch:
    """The same with a third of the labels, as for masked language models."""
    batch = text(random)
    chosen = torch.rand(ROWS, LENGTH, generator=random) < 0.3
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, -100)}


def classes(random: torch.Generator) -> Batch:
    """A text and one of two classes for each row."""
    return {**text(random), "labels": torch.randint(0, 2, (ROWS,), generator=random)}


def pairs(random: torch.Generator) -> Batch:
    """A text to read and a shorter one to write."""
    ids, mask = tokens(random, LENGTH - 2), padding(random, LENGTH - 2)
    return {
        "input_ids": tokens(random),
        "attention_mask": padding(random),
        "labels": ids.masked_fill(mask == 0, -100),
    }
