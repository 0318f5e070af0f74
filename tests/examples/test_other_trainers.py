"""The examples of trainer classes of other libraries, and in their manner: they learn, with few programs."""

from __future__ import annotations

from pathlib import Path

import lightning_like
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def test_a_module_with_a_training_step_learns() -> None:
    loop = lightning_like.make()
    loss = loop.fit(lightning_like.draw(60))
    assert loop.global_step == 60 and len(lightning_like.Loop.step.programs) == 2
    assert loss < 0.4 and float(loop.module.logged["accuracy"]) > 0.9


def test_a_model_of_transformers_trains_resumes_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import transformers_trainer as example

    example.make(tmp_path, num_train_epochs=1).train()
    trainer = example.make(tmp_path, num_train_epochs=12)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 12 * 8
    assert trainer.evaluate()["eval_loss"] < 0.1 and example.continues(trainer)
