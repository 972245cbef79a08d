"""Checkpoints: how they are written, found and read. Without torch, but for what converts.

| file | what it knows |
|---|---|
| `format` | a rank's file, byte by byte; how files and folders are called |
| `manifest` | the file that makes a checkpoint exist |
| `writer` | a durable file for each rank, then the manifest |
| `reader` | a checkpoint as a `StateSource`; `block_file`: verified bytes of one file |
| `catalogue` | which checkpoints there are, and which can be used |
| `verify` | every byte, compared |
| `retention`, `prune` | which ones stay, and removing the others |
| `store` | from a URL to `store_local` or `store_remote`, which do what `storage` asks for |
| `check` | does a state fit a model |
| `export`, `imports` | other systems' files; with torch, as are `exportable` and `whole` |
"""
