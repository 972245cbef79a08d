"""Codecs have the properties stated in their papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayzero.engine.compression.codecs import CastCodec, Codec, Int8Codec, SignCodec

CODECS: list[Codec] = [
    CastCodec("bf16", torch.bfloat16),
    CastCodec("fp16", torch.float16),
    Int8Codec(64),
    SignCodec(64),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
LENGTHS = (32, 96, 64 * 7, 300_000)


def encode_and_decode(codec: Codec, values: Tensor, out: Tensor | None = None) -> Tensor:
    payload = torch.full((codec.payload_bytes(values.numel()),), 99, dtype=torch.uint8)
    original = values.clone()
    codec.encode(values, payload)
    assert torch.equal(values.nan_to_num(), original.nan_to_num())
    add = out is not None
    out = torch.full_like(values, 7.0) if out is None else out
    codec.decode(payload, out, add=add)
    return out


@pytest.mark.parametrize("numel", LENGTHS)
def test_casts_round_to_nearest(numel: int) -> None:
    values = torch.randn(numel)
    assert torch.equal(encode_and_decode(CODECS[0], values), values.bfloat16().float())
    assert torch.equal(encode_and_decode(CODECS[1], values), values.half().float())


@pytest.mark.parametrize("numel", LENGTHS)
def test_int8_is_within_half_a_step_of_each_block(numel: int) -> None:
    values = torch.randn(numel) * 10.0 ** torch.randint(-9, 9, (numel // 32,)).repeat_interleave(32)
    decoded = encode_and_decode(Int8Codec(64), values)
    for original, result in zip(values.split(64), decoded.split(64), strict=True):
        assert (original - result).abs().max() <= original.abs().max() / 127 * 0.50001


@pytest.mark.parametrize("numel", LENGTHS)
def test_sign_uses_the_mean_magnitude_of_the_block(numel: int) -> None:
    values = torch.randn(numel)
    decoded = encode_and_decode(SignCodec(64), values)
    for original, result in zip(values.split(64), decoded.split(64), strict=True):
        expected = original.abs().mean() * torch.where(original >= 0, 1.0, -1.0)
        assert torch.allclose(result, expected)


@every_codec
def test_payload_bytes(codec: Codec) -> None:
    bits = {"bf16": 16, "fp16": 16, "int8": 8 + 32 / 64, "sign": 1 + 32 / 64}[codec.name]
    assert codec.payload_bytes(64 * 10) == 64 * 10 * bits / 8
    assert codec.payload_bytes(32) % 4 == 0


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_decoding_adds_or_replaces_in_any_dtype(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.randn(352).to(dtype)
    alone = encode_and_decode(codec, values)
    assert alone.dtype is dtype
    base = torch.arange(352).to(dtype)
    atol = 4 * torch.finfo(dtype).eps  # rounded before it was added, where both cancel
    added = encode_and_decode(codec, values, base.clone())
    torch.testing.assert_close(added, base + alone, rtol=torch.finfo(dtype).eps * 2, atol=atol)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_non_finite(codec: Codec, bad: float) -> None:
    values = torch.randn(352)
    values[-1] = bad
    assert not encode_and_decode(codec, values).isfinite().all()


@every_codec
def test_zeros(codec: Codec) -> None:
    assert torch.equal(encode_and_decode(codec, torch.zeros(352)), torch.zeros(352))
    values = torch.randn(352)
    values[100:132] = 0
    original = bool((encode_and_decode(codec, values)[100:132] == 0).all())
    assert original == codec.keeps_zero
