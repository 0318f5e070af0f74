"""transformers' Trainer, with the step compiled: trains, evaluates, saves, resumes and generates.

    spmd run -n 2 examples/transformers_trainer.py
    python examples/transformers_trainer.py --mode replicate

The model is a small Llama with random weights, and its text counts upwards; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import spmd
from spmd.integrations.transformers import Trainer

WORDS, LENGTH = 32, 12


def count_upwards(rows: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of words that count upwards; the first words of some are not learned."""
    text = [(torch.arange(LENGTH) + first) % WORDS for first in range(rows)]
    masked = [torch.where(torch.arange(LENGTH) < k % 4, -100, words) for k, words in enumerate(text)]
    return [{"input_ids": words, "labels": labels} for words, labels in zip(text, masked, strict=True)]


def make(folder: Path, mode: str = "fully_shard", **arguments: Any) -> Trainer:
    """A trainer for a new model, equal on all ranks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes))
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 10, "use_cpu": not torch.cuda.is_available()}
    saves = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    settings = {"per_device_train_batch_size": 8, "learning_rate": 0.01, **quiet, **saves, **arguments}
    return Trainer(
        model=model,
        args=TrainingArguments(str(folder), **settings),
        train_dataset=count_upwards(64),
        eval_dataset=count_upwards(16),
        compile_options={"parallel_mode": spmd.DataParallel(mode)},
    )


def continues(trainer: Trainer) -> bool:
    """Whether the model counts on; all ranks call it."""
    with spmd.unshard(trainer.model):
        words = torch.tensor([[3, 4, 5, 6]], device=trainer.args.device)
        found = trainer.model.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
    return found[0, 4:].tolist() == [7, 8, 9]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="fully_shard", choices=["replicate", "fully_shard"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "transformers_trainer")
    options = parser.parse_args()
    first = make(options.folder, options.mode, num_train_epochs=2)
    first.train()
    second = make(options.folder, options.mode, num_train_epochs=8)
    second.train(resume_from_checkpoint=True)  # goes on behind the two epochs
    metrics, right = second.evaluate(), continues(second)
    if spmd.world().get_rank() == 0:
        print(f"loss {metrics['eval_loss']:.3f}; 3, 4, 5, 6 is continued {'right' if right else 'wrong'}")
