"""What a fork server imports last: its children collect garbage, but not of what it imported."""

from __future__ import annotations

import gc

gc.freeze()
gc.enable()
