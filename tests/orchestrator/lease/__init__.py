"""Tests of the lease on a job's folder."""
