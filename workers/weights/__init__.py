"""Versions of the trainer's weights, read by other processes of its job.

A version is a step that every rank has mirrored: publishing it copies nothing. Ranks do not know
their readers, and never wait for them. This file imports nothing.
"""
