"""The examples of trainer classes in the manner of other libraries: they learn, with few programs."""

from __future__ import annotations

import lightning_like
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def test_a_module_with_a_training_step_learns() -> None:
    loop = lightning_like.make()
    loss = loop.fit(lightning_like.draw(60))
    assert loop.global_step == 60 and len(lightning_like.Loop.step.programs) == 2
    assert loss < 0.4 and float(loop.module.logged["accuracy"]) > 0.9


def test_a_model_of_transformers_learns_from_the_batches_of_a_tokenizer() -> None:
    pytest.importorskip("transformers")
    import hugging_face

    trainer = hugging_face.make()
    losses = trainer.train(40, rows=16)
    assert len(hugging_face.Trainer.training_step.programs) == 1
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    assert trainer.state["logits"].shape == (16, 2)
