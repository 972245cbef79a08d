"""Lightning's Trainer with DDP and with DeepSpeed's stages, under torchrun.

`lightning_fit.py FOLDER`: rank 0 writes {strategy: losses and weights} to FOLDER/results.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import rayzero.deepspeed

rayzero.deepspeed.install()

import lightning  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, deepspeed  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

deepspeed._validate_device_index_selection = lambda devices: None  # CPUs have no indices
STAGES = (1, 2, 3)


class OnCpus(DeepSpeedStrategy):
    """Lightning's own refuses what is not CUDA."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # after each epoch
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def fit(strategy: Any, folder: Path) -> dict[str, Any]:
    """Two epochs, the second by another Trainer from the first one's checkpoint."""
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    losses: list[float] = []
    for epochs in (1, 2):
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            strategy=strategy(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Regression()
        path = folder / "one-epoch" if epochs == 2 else None
        trainer.fit(model, DataLoader(data, batch_size=4), ckpt_path=path)
        trainer.save_checkpoint(folder / "one-epoch")
        losses += model.losses
    engine = trainer.strategy.model
    whole = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, OnCpus)
    state = model.state_dict() if whole else engine.module_state_dict()
    return {"losses": losses, "weights": {name: value.clone() for name, value in state.items()}}


def main() -> None:
    folder, results = Path(sys.argv[1]), {}
    results["ddp"] = fit(lambda: DDPStrategy(process_group_backend="gloo"), folder / "ddp")
    for stage in STAGES:
        results[str(stage)] = fit(
            lambda: OnCpus(stage=stage, process_group_backend="gloo"),  # noqa: B023
            folder / str(stage),
        )
    if torch.distributed.get_rank() == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
