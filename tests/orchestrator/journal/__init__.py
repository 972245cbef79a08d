"""Tests of the journal: lines, files, secrets, adoption."""
