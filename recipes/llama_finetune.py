"""Fine-tune a Llama under FSDP2 with a sharded, compressed AdamW.

    torchrun --nproc-per-node 2 recipes/llama_finetune.py                    # debug model, standard-library text
    torchrun --nproc-per-node 8 recipes/llama_finetune.py --model DIR --data FILE.jsonl --lr 1e-5
    python recipes/llama_finetune.py --help                                  # all options

Started again with the same arguments it goes on from its newest checkpoint.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model folder or nothing: this recipe never downloads

from llama_support.config import Config, read_command_line
from llama_support.data import check_same_data, load_data
from llama_support.errors import exit_on_bad_input
from llama_support.interrupts import Interrupted, Interrupts
from llama_support.loss import uses_liger
from llama_support.metrics import RunLog, StepClock
from llama_support.model import build_model, check_model, load_tokenizer, model_folder, read_llama_config
from llama_support.optimizers import build_optimizer, release_gradients
from llama_support.progress import (
    SkippedSteps,
    checkpoint_folder,
    describe_checkpoint,
    prepare_run_folder,
    resume,
    run_facts,
    save,
    stop_unless_finite,
)
from llama_support.report import read_run, write_report
from llama_support.sampling import write_sample
from llama_support.training import accumulate_gradient, clip_gradients, set_learning_rate, take_step, validation_loss
from llama_support.world import start_world
from transformers import set_seed

from flashoptim_dist import memory_report
from flashoptim_dist.checkpoint import Checkpointer


def train(config: Config, interrupts: Interrupts | None = None) -> None:
    """One start of a run: from its newest checkpoint, if there is one, to its last step. All ranks must call.

    Raises Interrupted, on every rank, once a step is saved after some rank was asked to end. A step that was left out
    is not saved: then it is the next one.
    """
    interrupts = interrupts or Interrupts()
    # torch's AdamW keeps fp32 weights, which FSDP2 casts for the matrix products: that needs a mesh on one GPU too.
    world = start_world(config.device, replicas=config.replicate, needs_mesh=config.optimizer != "flash_adamw")
    set_seed(config.seed % 2**32)  # the most that numpy takes

    # Everything that can be wrong with the input is found here, before a step is taken, by all ranks together.
    with world.all_or_none():
        prepare_run_folder(config)
        folder = model_folder(config.model)
        llama_config = read_llama_config(folder, config.sequence_length)
        tokenizer = load_tokenizer(folder)
        check_model(folder, llama_config)
        uses_liger(config.loss, world.device)
        data = load_data(config, tokenizer, llama_config.vocab_size, world.rank, world.size)
    check_same_data(data, world)

    model = build_model(config, folder, llama_config, world)
    optimizer = build_optimizer(config, model)
    release = release_gradients(config, model, optimizer)
    checkpointer = Checkpointer(
        checkpoint_folder(config), model, optimizer, dataloader=data.loader, keep_last=config.keep_last
    )
    progress = resume(config, checkpointer, world, release)

    log = RunLog(config.run_folder, world, step=progress.step, last_step=progress.last)
    log.say(data.summary)
    memory = memory_report(model, optimizer)
    log.say(str(memory))
    log.run(run_facts(config, memory, world))
    log.say(f"from step {progress.step} to {progress.last} in {config.run_folder}")
    if progress.note:
        log.say(progress.note)

    def evaluate(step: int) -> None:
        loss = validation_loss(model, data.validation, world)
        stop_unless_finite(checkpointer, f"validation after step {step}", step, loss=loss)
        log.validation(step, loss)
        if data.progress() and step > progress.first:
            log.say(f"training: {data.progress()}")

    if progress.step == progress.first:
        evaluate(progress.step)
    batches = data.steps(world)
    clock = StepClock(world.device)
    tokens = config.global_batch * config.sequence_length
    skipped = SkippedSteps(checkpointer, progress.step, progress.last, config.skips_in_a_row)
    interrupts.start_saving()
    for step in range(progress.step + 1, progress.last + 1):
        with clock.phase("data"):
            batch = next(batches)
        lr = set_learning_rate(optimizer, config, step - progress.first)
        with clock.phase("forward_and_backward"):
            # Gradient release clips here and steps each layer, too: what is below then only ends the update.
            loss = accumulate_gradient(model, batch, world, interrupts, release)
        with clock.phase("clipping"):
            norm = clip_gradients(model, optimizer, config.clip_norm) if release is None else None
        with clock.phase("optimizer"):
            grad_norm = take_step(optimizer, norm, release)
            optimizer.zero_grad()
        if not skipped.check(step, loss=loss, gradient_norm=grad_norm):
            log.say(f"step {step}: left out, its gradient norm is {grad_norm}")
        log.train(step, loss=loss, lr=lr, grad_norm=grad_norm, tokens=tokens, phases=clock.read())

        is_last = step == progress.last
        if is_last or (not interrupts.agreed and config.evaluate_every and step % config.evaluate_every == 0):
            evaluate(step)
        stops_here = interrupts.agreed and not is_last and not skipped.pending
        is_due = config.save_every and step % config.save_every == 0 and not skipped.pending
        if is_last or stops_here or is_due:
            saved = save(config, checkpointer, progress, step, world, release)
            log.checkpoint(step, saved)
        if stops_here:
            log.close()
            raise Interrupted(
                f"interrupted: step {step} of {progress.last} is saved; the same command goes on", interrupts.exit_code
            )
    log.close()
    if progress.step == progress.last:
        return
    sample = write_sample(config, model, tokenizer, data.sample, world)
    if world.is_main:
        if sample:
            print(sample)
        print(f"report: {write_report(config.run_folder, [read_run(config.run_folder)], title=config.run_folder.name)}")
        print(f"checkpoint: {saved}: {describe_checkpoint(saved, model)}")
        print("the same command again goes on from there")


def main() -> None:
    """Read the command line and train."""
    interrupts = Interrupts()
    interrupts.listen()
    train(read_command_line(), interrupts)


if __name__ == "__main__":
    exit_on_bad_input(main)
