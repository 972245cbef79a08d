"""The live page of a job: its sources, and what puts them together into one file.

The page knows /snapshot.json and nothing else. It shows; it has no control.
"""
