"""`ModelExport`: the full model as a state dict or as one file, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rayzero.engine.checkpoint.export_model import write_model_file
from rayzero.engine.checkpoint_io import is_late, load_model_state, without_frozen
from rayzero.engine.comm.collectives import run_on_all_ranks
from rayzero.engine.engine import Engine


class ModelExport(Engine):
    """Part of `DeepSpeedEngine`. Every method but the getter is collective."""

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The full model in CPU memory on rank 0, an empty dict on the others."""
        return without_frozen(self.module, self.state_dict(), exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = module_state_dict  # transformers and accelerate call it
    _consolidated_16bit_state_dict = module_state_dict

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Loads weights and buffers from a full state dict, the same one on every rank. Raises
        CheckpointMismatchError if names or shapes differ."""
        load_model_state(self._step, self.module, state_dict, strict)

    load_state_dict = load_module_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The config's value, for scripts that ask it, as transformers' Trainer does;
        `save_16bit_model` does not."""
        return self.settings.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the full model, in the dtype of its weights, as one file. At every stage: sharded
        weights are gathered unit by unit.

        Args:
            save_filename: `*.safetensors` for that format; otherwise `torch.load` reads it.

        Returns:
            Whether it was written: see `Engine.save`.
        """
        path = Path(save_dir) / save_filename
        if is_late(self.progress, str(path), self.rank):
            return False
        gathered = self._gather_state_dict(by_new_ranks=False)
        state = without_frozen(self.module, gathered, exclude_frozen_parameters)
        run_on_all_ranks(
            self._runtime.collectives,
            self.device,
            lambda: None if self.rank else write_model_file(state, path),
        )
        return True

    save_fp16_model = save_16bit_model
