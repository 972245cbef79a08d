"""Where a config may come from."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rayzero.engine.config import parse_config, read_config
from rayzero.engine.errors import ConfigError

# Its base64 has both characters that differ between the plain and the URL-safe alphabet.
DOCUMENT = {"train_batch_size": 8, "log_level": "~~~???>>>ÿÿÿ"}


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("padded", [True, False])
def test_base64(encode: Any, padded: bool) -> None:
    text = encode(json.dumps(DOCUMENT, ensure_ascii=False).encode()).decode()
    assert ("+" in text or "/" in text) == (encode is base64.b64encode)
    assert read_config(text if padded else text.rstrip("=")) == DOCUMENT


def test_base64_of_hjson_and_of_a_mistake() -> None:
    text = base64.b64encode(b"{ train_batch_size: 8 }").decode()
    assert parse_config(text).train_batch_size == 8
    twice = base64.b64encode(b'{"bf16": {"enabled": true, "enabled": false}}').decode()
    with pytest.raises(ConfigError, match=r"engine config in base64 .*'enabled' is given tw"):
        parse_config(twice)


@pytest.mark.parametrize("source", ["aGVsbG8=", "e30", "no such file", "a\0b", "x" * 5000, ""])
def test_text_that_is_neither_a_path_nor_base64_is_a_path_that_is_not_there(source: str) -> None:
    if source == "e30":  # base64 of "{}"
        assert read_config(source) == {}
        return
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(source)


def test_a_file_wins_over_base64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e30").write_text('{"train_batch_size": 8}')
    assert read_config("e30") == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' is given twice"),
        (b"{a: 1\n a: 2}", "the key 'a' is given twice"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b'{"a":' * 100_000, "nested too deeply|not JSON"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "nested too deeply"),
        (b'"text"', "a mapping of keys to values was expected"),
        (b" ", r"c\.json' is empty"),
        (b'{"train_batch_size": ' + b"9" * 6000 + b"}", "train_batch_size|not JSON"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        parse_config(path)


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 8}')
    assert parse_config(path).train_batch_size == 8


def test_json_on_one_line_is_read_as_json(tmp_path: Path) -> None:
    """Hjson alone would take the rest of the line into an unquoted value."""
    path = tmp_path / "c.json"
    path.write_text('{"gradient_clipping": Infinity, "train_batch_size": 8}')
    with pytest.raises(ConfigError, match=r"config '[^']*c\.json': gradient_clipping: .*finite"):
        parse_config(path)


def test_any_mapping_is_accepted_and_not_modified() -> None:
    inner = {"stage3_gather_fp16_weights_on_model_save": True, "cpu_offload": False}
    document = {"zero_optimization": inner, "train_batch_size": "auto", "bf16": True}
    before = json.dumps(document)
    parse_config(MappingProxyType(document))
    assert json.dumps(document) == before
