"""The `rayzero` command: arguments in, exit codes and readable lines out.

Whatever is heavy is imported by a command when it runs. This file imports nothing.
"""
