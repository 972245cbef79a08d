"""The engine's state as named ranges: all saving, moving and loading uses this folder."""
