"""The engine's state as named ranges: everything that saves, moves or loads goes through here."""
