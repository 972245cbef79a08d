"""Layouts of units and state, as integers. Any rank can compute the ranges of every other rank."""
