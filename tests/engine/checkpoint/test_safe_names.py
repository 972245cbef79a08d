"""Names from a checkpoint or a script cannot escape the checkpoint folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.checkpoint import store_local
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import is_safe_name
from rayzero.engine.checkpoint.imports.deepspeed_files import find_step_folder
from rayzero.engine.checkpoint.store_local import LocalStore
from rayzero.engine.checkpoint_io import check_tag, resolve_checkpoint
from rayzero.engine.errors import ConfigError, DataError

HOSTILE = ["..", ".", "", "/", "/etc", "../x", "a/../../x", "a//b", "a/", " ", "a\0b", "a\nb"]
HOSTILE += ["..\u200b", "\u202egpj", "\ud800", "x" * 256, ". .", "a/\t/b"]
PARTS = st.sampled_from(["..", ".", "", "/", "a", "step-1", "\0", "\\", "%2e%2e", "~", "é", " "])
NAMES = st.lists(PARTS | st.text(max_size=3), max_size=6).map("/".join) | st.text(max_size=12)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_outside_the_folder_are_rejected(name: str, tmp_path: Path):
    assert not is_safe_name(name)
    with pytest.raises(ConfigError, match="is not a folder's name"):
        check_tag(name)
    (tmp_path / "job").mkdir()
    with pytest.raises(DataError, match="there is no checkpoint"):
        resolve_checkpoint(str(tmp_path / "job"), name)


@pytest.mark.parametrize("name", ["global_step100", "a/b", "v1.2", "é", "..a", "a..", "with space"])
def test_names_inside_the_folder_are_accepted(name: str):
    assert is_safe_name(name)
    assert check_tag(name) == name


@given(NAMES)
def test_safe_names_stay_inside_the_folder(name: str):
    if is_safe_name(name):
        top = "/top/folder"
        assert os.path.normpath(os.path.join(top, name)).startswith(top + "/")
        assert "\0" not in name


@pytest.mark.parametrize("latest", ["../other", "/", ".", "a/../../other"])
def test_latest_file_cannot_escape_the_folder(latest: str, tmp_path: Path):
    """rayzero's and DeepSpeed's: the file comes with the checkpoint and is not trusted."""
    job, other = tmp_path / "job", tmp_path / "other"
    (job / "a").mkdir(parents=True)
    other.mkdir()
    (other / "mp_rank_00_model_states.pt").touch()
    (job / "latest").write_text(latest)
    with pytest.raises(DataError, match="there is no checkpoint"):
        resolve_checkpoint(str(job), None)
    with pytest.raises(DataError, match="which is not a folder in"):
        find_step_folder(job)


def test_replace_does_not_follow_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    victim = tmp_path / "victim"
    victim.write_text("original")
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setattr(store_local, "token_hex", lambda size: "ab" * size)
    (folder / ".latest.abababab.partial").symlink_to(victim)
    with pytest.raises(StoreError):
        LocalStore(folder).replace("latest", b"new")
    assert victim.read_text() == "original"
