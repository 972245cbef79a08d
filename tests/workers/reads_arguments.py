"""Reads the command line when it is imported."""

from __future__ import annotations

import argparse

ARGUMENTS = argparse.ArgumentParser().parse_args(["--unknown"])
