"""Adam without bias correction, which DeepSpeed offers and torch does not."""

from __future__ import annotations

from typing import Any

import torch

# A count of steps that no power of a beta survives: torch's corrections 1 - beta^step are 1 then.
# The next whole number is the same float32, so the count stays what it is.
ENDLESS = 1e15


class UncorrectedAdam(torch.optim.Adam):
    """torch's Adam in the steady state of its bias corrections, from the first step on."""

    def step(self, closure: Any = None) -> Any:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.state[param]:
                    device = param.device if group["fused"] else torch.device("cpu")
                    moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
                    self.state[param]["step"] = torch.tensor(
                        ENDLESS, dtype=torch.float32, device=device
                    )
                    self.state[param].update({key: torch.zeros_like(param) for key in moments})
        return super().step(closure)
