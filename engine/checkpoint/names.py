"""Names that lead nowhere but into the folder that they are looked for in. Pure."""

from __future__ import annotations

_MOST_BYTES = 255  # of one part: what file systems allow


def stays_below(name: str) -> bool:
    """Whether `name`, with `/` between folders, is that of something below a folder, whatever wrote
    it: a script, a file called `latest` that came with a checkpoint.

    Neither absolute, nor with `..` or empty parts, nor with characters that end or hide a name.
    """
    return all(_is_plain(part) for part in name.split("/"))


def _is_plain(part: str) -> bool:
    try:
        size = len(part.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return bool(part.strip(". ")) and part.isprintable() and size <= _MOST_BYTES
