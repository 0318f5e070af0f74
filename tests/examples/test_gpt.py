"""The example's model: causal, reproducible, and of the size it was asked for."""

from __future__ import annotations

import gpt
import pytest
import torch

TINY = gpt.Config(width=16, layers=2, heads=2, context=8)


def test_no_position_sees_a_later_one() -> None:
    model = gpt.GPT(TINY)
    one = torch.arange(8)[None]
    other = one.clone()
    other[0, 5:] = 99
    torch.testing.assert_close(model(one)[:, :5], model(other)[:, :5], rtol=0, atol=0)
    assert not torch.equal(model(one)[:, 5:], model(other)[:, 5:])


def test_tied_weights_are_one_parameter() -> None:
    tied = gpt.GPT(gpt.Config(width=16, layers=1, heads=2, context=8, tied=True))
    assert tied.head.weight is tied.bytes.weight


def test_a_sample_starts_with_its_prompt_and_repeats_with_its_seed() -> None:
    model = gpt.GPT(TINY)
    first, second = (model.sample(b"def ", 12, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first == second and first.startswith(b"def ") and len(first) == 16


def test_heads_that_do_not_fit_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="a width of 10 does not divide into 4 heads"):
        gpt.Config(width=10, heads=4)
