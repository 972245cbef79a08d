"""A model of frozen quantized layers with trainable adapters beside them. The layers keep their
parameters as bitsandbytes' 4-bit and 8-bit layers and torchao's tensors do, written out small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 12
LEVELS = torch.linspace(-1, 1, 16, dtype=torch.float64)


class Scales:
    """A quantization state; that of its scales is `state2`."""

    def __init__(self, absmax: Tensor, offset: Tensor, state2: Scales | None = None) -> None:
        self.absmax, self.offset, self.state2 = absmax, offset, state2
        self.code = LEVELS.clone()
        self.shape = torch.Size([WIDTH, WIDTH])


class NibbleParam(nn.Parameter):
    """Two 4-bit numbers a byte, in memory of `storage`'s dtype."""

    quant_state: Scales
    bnb_quantized: bool


class NibbleLinear(nn.Module):
    """As `bitsandbytes.nn.Linear4bit`, with double quantization."""

    def __init__(self, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (WIDTH * WIDTH // 2,), dtype=torch.uint8)
        self.weight = NibbleParam(packed.view(storage).view(-1, 1), requires_grad=False)
        outer = Scales(torch.rand(1, dtype=torch.float64), torch.rand((), dtype=torch.float64))
        inner = Scales(torch.rand(WIDTH, 1, dtype=torch.float64), torch.rand(()).double(), outer)
        self.weight.quant_state, self.weight.bnb_quantized = inner, True
        self.support_avx512bf16_for_cpu = True  # as bitsandbytes finds on some CPUs

    def forward(self, x: Tensor) -> Tensor:
        state, packed = self.weight.quant_state, self.weight.view(torch.uint8).view(-1)
        assert state.state2 is not None
        indexes = torch.stack([packed >> 4, packed & 15], dim=-1).long()
        scale = state.absmax * state.state2.absmax + state.offset
        return F.linear(x, (state.code[indexes].view(WIDTH, WIDTH) * scale).to(x.dtype))


class ByteParam(nn.Parameter):
    CB: Tensor | None
    SCB: Tensor | None
    has_fp16_weights = False


class ByteState:
    CB: Tensor
    SCB: Tensor | None = None


class ByteLinear(nn.Module):
    """As `bitsandbytes.nn.Linear8bitLt`: its first forward takes the memory from the parameter."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = ByteParam(values, requires_grad=False)
        self.weight.CB, self.weight.SCB = self.weight.data, torch.rand(WIDTH, 1).double()
        self.state = ByteState()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        assert self.state.SCB is not None
        result = F.linear(x, (self.state.CB * self.state.SCB / 127).to(x.dtype))
        self.weight.data = self.state.CB
        return result


class ScaledTensor(torch.Tensor):
    """As torchao's tensors: no memory of its own. Its integers are in column order."""

    integers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scale: Tensor) -> ScaledTensor:
        made: ScaledTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, integers.shape, dtype=scale.dtype, device=integers.device
        )
        made.integers, made.scale = integers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> ScaledTensor:
        return ScaledTensor(inner["integers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            weight = args[1]
            return F.linear(args[0], (weight.integers * weight.scale).to(args[0].dtype))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moves = (torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.detach)
        if func.overloadpacket not in moves:
            raise NotImplementedError(f"{func} of a ScaledTensor")
        to = {key: value for key, value in (kwargs or {}).items() if key == "device"}
        copy = func.overloadpacket is not torch.ops.aten.detach
        parts = [part.to(**to, copy=copy) for part in (args[0].integers, args[0].scale)]
        return ScaledTensor(*parts)


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        integers = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8).t()
        scale = torch.rand(WIDTH, 1, dtype=torch.float64) / 127
        self.weight = nn.Parameter(ScaledTensor(integers, scale), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Adapted(nn.Module):
    """Frozen quantized layers, each with a trainable one beside it."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NibbleLinear(storage), ByteLinear(), ScaledLinear()])
        self.adapters = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in self.layers
        )
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = x + torch.tanh(layer(x) + adapter(x))
        normed: Tensor = self.norm(x)
        return normed


class Model(nn.Module):
    def __init__(self, seed: int, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(*(Adapted(storage) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss
