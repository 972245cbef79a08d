"""The engine on the virtual accelerator: no races, no early frees, one host read a step."""
