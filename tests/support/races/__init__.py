"""The engine's configurations on the virtual accelerator, and mutants of its waits.

models    small models with the structure of large ones
cases     configurations: all combinations of the main settings, and covering arrays of all
running   trains a case on virtual ranks, and says what was found
waits     every wait, record and release of the product, from its source
mutants   the product with one of them left out
"""
