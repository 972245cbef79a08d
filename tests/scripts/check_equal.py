"""Trainer and Accelerate at every stage against plain torch, in float64, on all ranks' samples.

Prints the largest differences of losses and final weights by case: `{"losses": [], "errors": ...}`;
and the losses of a loop of one's own, which comes first, so that rayzero joins torchrun's ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from corpus import report
from safetensors.torch import load_file
from together import reset
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tests.deepspeed.scripts.hf_trainer import (
    LR,
    STEPS,
    Tokens,
    ds_config,
    labels,
    make_model,
    plain_steps,
)
from tests.engine.scripts import tiny


def trainer_case(stage: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Stages 1 and 3 with the config's optimizer, 0 and 2 with Trainer's; stages 1 and 2 stop in
    the middle and are resumed by a second Trainer; 3 with gradient checkpointing."""
    losses: list[float] = []
    stops = [3, STEPS] if stage in (1, 2) else [STEPS]
    for stop in stops:
        arguments = TrainingArguments(
            folder,
            deepspeed=ds_config(stage, own_optimizer=stage % 2 == 1),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=stop,
            learning_rate=LR,
            lr_scheduler_type="constant",
            save_steps=3,
            logging_steps=1,
            gradient_checkpointing=stage == 3,
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
        )
        trainer = Trainer(make_model(), arguments, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=True if stop > stops[0] else None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.save_model(f"{folder}/final")
        first = trainer.is_world_process_zero()
        torch.distributed.barrier()
        reset()
    return losses, load_file(f"{folder}/final/model.safetensors"), first


def accelerate_case(stage: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """`accumulate`, clipping and a state that is saved after step 3, spoilt and loaded."""
    config: dict[str, Any] = ds_config(stage, own_optimizer=False)
    plugin = DeepSpeedPlugin(hf_ds_config=config | {"gradient_clipping": 1.0})
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=2, kwargs_handlers=[gloo]
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    loader = DataLoader(Tokens(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step() -> float:
        """One epoch, which is one step: the mean over ranks and micro-batches."""
        micro = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch["input_ids"], labels=labels(batch["input_ids"])).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            micro.append(accelerator.reduce(loss.detach(), "mean").item())
        return sum(micro) / len(micro)

    losses = [step() for _ in range(3)]
    accelerator.save_state(folder)
    step()
    accelerator.load_state(folder)
    losses += [step() for _ in range(STEPS - 3)]
    return losses, accelerator.get_state_dict(model), accelerator.is_main_process


def main(folder: str) -> None:
    own = [tiny.train(stage) for stage in range(4)]
    plain_losses, plain_weights = plain_steps()
    errors: dict[str, list[float]] = {}
    for case in (trainer_case, accelerate_case):
        for stage in range(4):
            name = f"{case.__name__} {stage}"
            losses, weights, first = case(stage, str(Path(folder, name)))
            if first:
                pairs = zip(losses, plain_losses, strict=True)
                differences = [
                    (plain_weights[k] - v).abs().max().item() for k, v in weights.items()
                ]
                errors[name] = [max(abs(a - b) for a, b in pairs), max(differences)]
            torch.distributed.barrier()
            reset()
    report([], errors=errors, own=own, processes=torch.distributed.get_world_size())


if __name__ == "__main__":
    main(sys.argv[1])
