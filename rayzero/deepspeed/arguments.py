"""`add_config_arguments`: the command-line arguments that DeepSpeed's scripts have."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config FILE`, and their old names; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the training engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="for the script's own use; nothing reads it here"
    )
    group.add_argument("--deepspeed_config", type=str, help="path of the config file")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, help="old name of --deepspeed_config")
    return parser
