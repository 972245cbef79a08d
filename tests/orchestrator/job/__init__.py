"""Tests of the job's process, its clients and its lease."""
