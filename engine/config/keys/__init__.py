"""The table of keys: a row for every key that DeepSpeed 0.19 knows, and for ours. Data only.

`rows` says what a row is, the files beside it hold the rows by theme, and `table` puts them
together. To land a feature, change its rows' `REFUSED` into `IMPLEMENTED`: nothing else here needs
to change. This file imports nothing.
"""
