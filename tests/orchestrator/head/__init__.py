"""Tests of what a job's process and its followers say to each other."""
