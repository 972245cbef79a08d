"""Files as blocks of rows: Parquet, JSON lines, WebDataset tars, folders of images.

`files.py` lists and reads files of any store, with retries; a format (`formats.py`,
`json_lines.py`, `webdataset.py`) finds the blocks of one file and reads one; `index.py` keeps the
blocks that were found; `file_blocks.py` is the source of their rows, `image_folder.py` the source
whose rows are files. Nothing here imports torch. This file imports nothing.
"""
