"""Differences of two specs; `tests/orchestrator/journal` has the rest."""

from __future__ import annotations

from rayzero.orchestrator.job_file import diff_documents


def test_diff_redacts_changed_secret():
    old = {"args": {"hf_token": "p4ss"}, "checkpoint": {"path": "s3://k:p4ss@b/x"}, "seed": 1}
    new = {"args": {"hf_token": "w0rd"}, "checkpoint": {"path": "s3://k:w0rd@b/x"}, "seed": 2}
    assert list(diff_documents(old, new).values()) == [
        "args.hf_token: *** -> ***",
        'checkpoint.path: "s3://***@b/x" -> "s3://***@b/x"',
        "seed: 1 -> 2",
    ]
    (removed,) = diff_documents({"args": {"hf_token": "p4ss"}}, {}).values()
    assert removed == "args.hf_token: *** -> (none)"
