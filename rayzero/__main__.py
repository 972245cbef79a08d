"""`python -m rayzero` and the `rayzero` command."""

from __future__ import annotations


def main() -> None:
    from rayzero.orchestrator.cli.app import app

    app(prog_name="rayzero")


if __name__ == "__main__":
    main()
