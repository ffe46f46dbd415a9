"""Fine-tune a Llama under FSDP2 with a sharded, compressed AdamW.

    torchrun --nproc-per-node 2 recipes/llama_finetune.py                    # debug model, standard-library text
    torchrun --nproc-per-node 8 recipes/llama_finetune.py --model DIR --data FILE.jsonl --lr 1e-5
    python recipes/llama_finetune.py --help                                  # all options

Started again with the same arguments it goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import math
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model folder or nothing: this recipe never downloads

import torch
import tyro
from llama_support.config import Config
from llama_support.data import load_data
from llama_support.errors import BadInput, exit_on_bad_input
from llama_support.metrics import RunLog
from llama_support.model import build_model, check_model, load_tokenizer, model_folder, read_llama_config
from llama_support.optimizers import build_optimizer
from llama_support.training import accumulate_gradient, clip_gradients, learning_rate, validation_loss
from llama_support.world import start_world


def train(config: Config) -> None:
    """One start of a run, from the newest checkpoint if there is one to the last step. All ranks must call."""
    world = start_world(config.device)
    torch.manual_seed(config.seed)
    with world.all_or_none():
        config.check()
        config.run_folder.mkdir(parents=True, exist_ok=True)
        folder = model_folder(config.model)
        llama_config = read_llama_config(folder, config.sequence_length)
        tokenizer = load_tokenizer(folder)
        check_model(folder, llama_config, tokenizer)
        data = load_data(config, tokenizer, world.rank, world.size)
    model = build_model(config, folder, llama_config, world)
    optimizer = build_optimizer(config, model)
    start = 0
    log = RunLog(config.run_folder, is_main=world.is_main, step=start, last_step=config.steps, device=world.device)
    log.say(data.summary)
    log.validation(start, validation_loss(model, data.validation, world))
    steps = iter(data.loader)
    for step in range(start, config.steps):
        batches = next(steps)
        loss = accumulate_gradient(model, batches, world)
        grad_norm = clip_gradients(model, config.clip_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise BadInput(f"step {step + 1} has loss {loss} and gradient norm {grad_norm}")
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        tokens = config.global_batch * config.sequence_length
        log.train(step + 1, loss=loss, lr=lr, grad_norm=grad_norm, tokens=tokens)
        if config.evaluate_every and (step + 1) % config.evaluate_every == 0 and step + 1 < config.steps:
            log.validation(step + 1, validation_loss(model, data.validation, world))
    log.validation(config.steps, validation_loss(model, data.validation, world))
    log.close()


def main() -> None:
    """Read the command line and train."""
    train(tyro.cli(Config))


if __name__ == "__main__":
    exit_on_bad_input(main)
