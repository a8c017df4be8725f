"""Data as people have it, to samples of token ids.

`files` finds what lies where, `rows` and `stored` read it row by row, `forms` makes a document of
a row, `samples` makes samples of documents. `dataset` is all of it.
"""
