"""Frozen quantized parameters keep their bits, and rank 0's values, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import deepspeed
from rayzero.engine import runtime_builder
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.session import use_session
from tests.engine.state.blocks import Block, StateSession
from tests.engine.zero.packed_models import WIDTH, Model, NibbleLinear, ScaledLinear, ScaledTensor
from tests.support.ranks import run_ranks

STEPS, LR = 3, 0.3


def make_batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def make_engine(stage: int, model: nn.Module, **options: Any) -> Any:
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage, **options.pop("zero", {})},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
    }
    return rayzero.initialize(model=model, config=config | options)[0]


def train_plainly() -> tuple[list[float], float]:
    model = Model(seed=0)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, LR)
    losses = []
    for step in range(STEPS):
        loss = model(make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model(make_batch(STEPS)).item()


def all_bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The bytes of all tensors of a state dict, those inside of others too."""
    bits = {}
    for name, value in state.items():
        inner = value.__tensor_flatten__()[0] if isinstance(value, ScaledTensor) else ()
        for part in inner:
            bits[f"{name}.{part}"] = getattr(value, part).contiguous().view(torch.uint8)
        if not inner:
            bits[name] = value.contiguous().view(torch.uint8)
    return bits


def quantized_bits(engine: rayzero.Engine) -> dict[str, Tensor]:
    """The bytes of all that is frozen in an engine, on rank 0."""
    return {name: it for name, it in all_bits(engine.state_dict()).items() if "adapter" not in name}


def check_stage(rank: int, world: int, stage: int, folder: Path) -> tuple[Block, float]:
    losses, expected = train_plainly()
    model = Model(seed=rank)  # rank 0's values are taken
    engine = make_engine(stage, model)
    mine = slice(4 // world * rank, 4 // world * (rank + 1))
    for step in range(STEPS):
        loss = engine(make_batch(step)[mine])
        engine.backward(loss)
        engine.step()
        assert engine.metrics.loss == pytest.approx(losses[step], abs=1e-9)
    with torch.no_grad():
        assert engine(make_batch(STEPS)).item() == pytest.approx(expected, abs=1e-9)
    if rank == 0:
        assert_equal(quantized_bits(engine), all_bits(without_adapters(Model(seed=0))))
    else:
        engine.state_dict()
    sharded = [unit for unit in engine._runtime.units if "quantized" in unit.name]
    assert len(sharded) == (3 if stage == 3 else 0)
    layers = [it for it in model.modules() if isinstance(it, NibbleLinear)]
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    engine.save(folder, f"stage-{stage}")
    block = Block.of(engine)
    engine.close()

    # Another stage, and other values of what is frozen: those of the checkpoint are taken.
    other = make_engine(3 - stage, Model(seed=5))
    other.load(folder, f"stage-{stage}")
    with torch.no_grad():
        assert other(make_batch(STEPS)).item() == pytest.approx(expected, abs=1e-9)
    other.close()
    return block, expected


def without_adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: it for name, it in model.state_dict().items() if "adapter" not in name}


def assert_equal(seen: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert seen.keys() == expected.keys()
    assert [name for name in seen if not torch.equal(seen[name], expected[name])] == []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_quantized_parameters_equal_plain_torch(stage: int, tmp_path: Path) -> None:
    (first, expected), (second, _) = run_ranks(2, check_stage, stage, tmp_path)
    # After a fault a job builds the model again, and restores all ranks' parts.
    with use_session(StateSession([first, second])):
        engine = make_engine(stage, Model(seed=7))
    with torch.no_grad():
        assert engine(make_batch(STEPS)).item() == pytest.approx(expected, abs=1e-9)


def check_bits(rank: int, world: int, stage: int, zero: dict[str, Any]) -> None:
    model = Model(seed=0, storage=torch.float16)
    engine = make_engine(stage, model, zero=zero, bf16={"enabled": True})
    loss = engine(make_batch(0)[2 * rank : 2 * rank + 2])
    engine.backward(loss)
    engine.step()
    seen = {name: it for name, it in quantized_bits(engine).items() if "layers" in name}
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        gathered = all_bits(without_adapters(model))
    expected = all_bits(without_adapters(Model(seed=0, storage=torch.float16)))
    expected = {name: it for name, it in expected.items() if "layers" in name}
    assert_equal({name: it for name, it in gathered.items() if name in expected}, expected)
    if rank == 0:
        assert_equal(seen, expected)
    engine.close()


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (3, {"zero_quantized_weights": True}), (3, {"offload_param": {"device": "cpu"}})],
    ids=["stage 0", "compressed gathers", "offloaded"],
)
def test_bits_in_a_floating_point_dtype_are_not_cast(stage: int, zero: dict[str, Any]) -> None:
    run_ranks(2, check_bits, stage, zero)


def count_whole(rank: int, world: int, stage: int) -> list[str]:
    with mock.patch.object(runtime_builder.log, "info") as info:
        make_engine(stage, Model(seed=0)).close()
    return [text % tuple(rest) for text, *rest in (call.args for call in info.call_args_list)]


def test_parameters_that_stay_whole_are_told_once() -> None:
    told = "6 quantized parameters, such as blocks.0.layers.1.weight (ByteParam), are not sharded"
    first, second = run_ranks(2, count_whole, 3)
    assert [line.startswith(told) for line in first] == [True]
    assert second == []
    assert run_ranks(2, count_whole, 2) == [[], []]


def test_layers_are_quantized_when_they_are_moved() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), UnquantizedLinear())
    engine = make_engine(2, model)
    assert model[1].weight is model[1].packed
    assert engine._runtime.ungrouped_params["1.weight"].dtype is torch.uint8
    engine.close()


class UnquantizedLinear(NibbleLinear):
    """Quantizes in `to`, as bitsandbytes' do."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = self.weight
        self.weight = type(self.weight)(torch.rand(WIDTH, WIDTH), requires_grad=False)
        self.weight.bnb_quantized = False

    def to(self, *args: Any, **kwargs: Any) -> UnquantizedLinear:
        self.weight = self.packed
        return self


def test_state_dict_of_tensor_subclasses(tmp_path: Path) -> None:
    model, other = (nn.Sequential(nn.Linear(WIDTH, WIDTH), ScaledLinear()) for _ in range(2))
    engine, second = make_engine(3, model), make_engine(0, other)
    second.load_module_state_dict(engine.module_state_dict())
    assert_equal(all_bits(second.module_state_dict()), all_bits(engine.module_state_dict()))
    engine.save_16bit_model(tmp_path)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert_equal(all_bits(loaded), all_bits(engine.module_state_dict()))
    with pytest.raises(DataError, match=r"cannot hold 1.weight, a ScaledTensor"):
        engine.save_16bit_model(tmp_path, "model.safetensors")


def test_trainable_quantized_parameter_is_refused() -> None:
    model = ScaledLinear()
    model.weight.requires_grad_()
    with pytest.raises(ConfigError, match=r"weight, a ScaledTensor, requires gradients"):
        make_engine(0, model)


def test_quantized_parameter_without_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), NibbleLinear())
    model[1].weight = type(model[1].weight)(model[1].weight.to("meta"), requires_grad=False)
    model[1].weight.bnb_quantized = False
    with pytest.raises(ConfigError, match="outside of zero_init"):
        make_engine(0, model)
