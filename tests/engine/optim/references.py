"""Reference implementations, on full tensors, of optimizers that PyTorch lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.engine import zoo

Groups = list[dict[str, Any]]


class ReferenceOptimizer(torch.optim.Optimizer):
    """Calls `update` for every parameter."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999)}

    def __init__(self, groups: Groups, **options: Any) -> None:
        super().__init__(groups, {"weight_decay": 0.0} | self.defaults_of_class | options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["t"] = state.get("t", 0) + 1
                    self.update(param, param.grad, state, **group)


class Lion(ReferenceOptimizer):
    """Algorithm 2 of Chen et al. 2023, with decoupled weight decay times the learning rate."""

    def update(self, w: Tensor, g: Tensor, s: dict[str, Any], **o: Any) -> None:
        m = s.get("m", torch.zeros_like(w))
        c = o["betas"][0] * m + (1 - o["betas"][0]) * g
        w -= o["lr"] * (torch.sign(c) + o["weight_decay"] * w)
        s["m"] = o["betas"][1] * m + (1 - o["betas"][1]) * g


class Lamb(ReferenceOptimizer):
    """Algorithm 2 of You et al. 2020, with DeepSpeed's differences: the
    direction uses uncorrected moments, bias corrections scale the step, and the ratio is clamped.
    """

    defaults_of_class: ClassVar[dict[str, Any]] = ReferenceOptimizer.defaults_of_class | {
        "eps": 1e-8,
        "bias_correction": True,
        "eps_inside_sqrt": False,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
    }

    def update(self, w: Tensor, g: Tensor, s: dict[str, Any], **o: Any) -> None:
        b1, b2 = o["betas"]
        s["m"] = m = b1 * s.get("m", torch.zeros_like(w)) + (1 - b1) * g
        s["v"] = v = b2 * s.get("v", torch.zeros_like(w)) + (1 - b2) * g * g
        root = (v + o["eps"]) ** 0.5 if o["eps_inside_sqrt"] else v**0.5 + o["eps"]
        u = m / root + o["weight_decay"] * w
        ratio = 1.0
        if w.norm() > 0 and u.norm() > 0:
            ratio = min(max((w.norm() / u.norm()).item(), o["min_coeff"]), o["max_coeff"])
        size = o["lr"]
        if o["bias_correction"]:
            size *= (1 - b2 ** s["t"]) ** 0.5 / (1 - b1 ** s["t"])
        w -= size * ratio * u


class MuonAndAdamW:
    """torch.optim.Muon for the matrices, torch.optim.AdamW for the rest, as one optimizer."""

    def __init__(self, groups: Groups, muon: dict[str, Any], adam: dict[str, Any]) -> None:
        parts: dict[bool, Groups] = {True: [], False: []}
        for group in groups:
            for is_muon, chosen in parts.items():
                params = [it for it in group["params"] if _uses_muon(it) is is_muon]
                chosen += [{**group, "params": params}] if params else []
        self.optimizers = [
            torch.optim.Muon(parts[True], **muon),
            torch.optim.AdamW(parts[False], **adam),
        ]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def _uses_muon(param: Tensor) -> bool:
    """A matrix other than the embedding."""
    return param.ndim == 2 and param.shape != (zoo.VOCAB, zoo.WIDTH)


MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
ADAM = {"lr": 0.004, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.05}


def _adafactor(groups: Groups, **options: Any) -> Any:
    from transformers import Adafactor  # which takes seconds to import

    return Adafactor(groups, **options)


def muon(groups: Groups) -> Any:
    return MuonAndAdamW(groups, MUON, ADAM)


# name: (config, plain PyTorch equivalent). The second group overrides the learning rate.
PAIRS: dict[str, tuple[dict[str, Any], Callable[[Groups], Any]]] = {
    "adamw": (
        {"type": "AdamW", "params": {"lr": 1e-2}},
        lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0),
    ),
    "adam": (
        {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "amsgrad": True}},
        lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    ),
    "sgd": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        {"type": "Adagrad", "params": {"lr": 0.1, "initial_accumulator_value": 0.1}},
        lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1),
    ),
    "rmsprop": (
        {"type": "RMSprop", "params": {"lr": 1e-2, "momentum": 0.5}},
        lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5),
    ),
    "lion": (
        {"type": "Lion", "params": {"lr": 3e-3, "betas": [0.9, 0.99]}},
        lambda groups: Lion(groups, lr=3e-3, betas=(0.9, 0.99)),
    ),
    "lamb": (
        {"type": "Lamb", "params": {"lr": 5e-2, "max_coeff": 0.9, "min_coeff": 0.2}},
        lambda groups: Lamb(groups, lr=5e-2, max_coeff=0.9, min_coeff=0.2),
    ),
    "adafactor": (
        {
            "type": "transformers.Adafactor",
            "params": {"lr": 0.05, "relative_step": False, "beta1": 0.5, "weight_decay": 0.1},
        },
        lambda groups: _adafactor(
            groups, lr=0.05, relative_step=False, beta1=0.5, weight_decay=0.1
        ),
    ),
    "adafactor_without_lr": (
        {"type": "transformers.Adafactor", "params": {"clip_threshold": 0.5}},
        lambda groups: _adafactor(groups, clip_threshold=0.5),
    ),
    "muon": (
        {
            "type": "Muon",
            "params": {
                "ns_method": "standard",
                "muon_lr": MUON["lr"],
                "adam_lr": ADAM["lr"],
                "momentum": MUON["momentum"],
                "betas": list(ADAM["betas"]),
                "eps": ADAM["eps"],
                "weight_decay": 0.05,
            },
        },
        muon,
    ),
}
