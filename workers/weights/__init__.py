"""Versions of the trainer's weights, read by other processes of its job.

A version is a step that every rank has mirrored: nothing is copied for it, no rank waits for a
reader, and none knows of it. This file imports nothing.
"""
