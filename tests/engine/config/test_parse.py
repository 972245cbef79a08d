"""Sources of a config: files, among them real ones, JSON, Hjson, base64, mappings."""

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


def test_base64_of_hjson_and_of_invalid_text() -> None:
    text = base64.b64encode(b"{ train_batch_size: 8 }").decode()
    assert parse_config(text).train_batch_size == 8
    twice = base64.b64encode(b'{"bf16": {"enabled": true, "enabled": false}}').decode()
    with pytest.raises(ConfigError, match=r"engine config in base64 .*'enabled' is given tw"):
        parse_config(twice)


@pytest.mark.parametrize("source", ["aGVsbG8=", "e30", "no such file", "a\0b", "x" * 5000, ""])
def test_other_text_is_a_missing_path(source: str) -> None:
    if source == "e30":  # base64 of "{}"
        assert read_config(source) == {}
        return
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(source)


def test_file_takes_precedence_over_base64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e30").write_text('{"train_batch_size": 8}')
    assert read_config("e30") == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"zero_optimization": {"stage": 1, "stage": 2}}', "the key 'stage' is given twice"),
        (b"{a: 1\n a: 2}", "the key 'a' is given twice"),
        (b"{", "is not JSON or Hjson"),
        (b"[1, 2]", "a mapping of keys to values was expected"),
        (b"\xff\xfe\x00", "cannot be read: it is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply|not JSON"),
        (b'{"a":' * 20_000, "nested too deeply|not JSON"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "nested too deeply"),
        (b" ", r"c\.json' is empty"),
        (b"{\n  gradient_clipping: 1e999\n}", r"c\.json' has a number above a float's range"),
        (b'{"train_batch_size": ' + b"9" * 6000 + b"}", "train_batch_size|not JSON"),
    ],
)
def test_error_names_invalid_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(path)
    assert str(path) in str(caught.value)


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 8}')
    assert parse_config(path).train_batch_size == 8


def test_single_line_json(tmp_path: Path) -> None:
    """An Hjson parser would read the rest of the line as an unquoted value."""
    path = tmp_path / "c.json"
    path.write_text('{"gradient_clipping": Infinity, "train_batch_size": 8}')
    with pytest.raises(ConfigError, match=r"config '[^']*c\.json': gradient_clipping: .*finite"):
        parse_config(path)


def test_mappings_are_accepted_and_not_modified() -> None:
    inner = {"stage3_gather_fp16_weights_on_model_save": True, "cpu_offload": False}
    document = {"zero_optimization": inner, "train_batch_size": "auto", "bf16": True}
    before = json.dumps(document)
    parse_config(MappingProxyType(document))
    assert json.dumps(document) == before


FILES = sorted((Path(__file__).parent / "files").iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_file_has_no_unknown_keys(path: Path) -> None:
    """Keys may be unsupported, but none is unknown or misread."""
    try:
        parse_config(path)
    except ConfigError as error:
        text = str(error)
        if "\n" not in text:
            text = text.partition("': ")[2]
        lines = [line.strip() for line in text.splitlines() if "mistakes:" not in line]
        known = ("refused: ", "that this", "two gradient compressions")
        unknown = [line for line in lines if not any(reason in line for reason in known)]
        assert unknown == []
