"""Conversion of users' data to samples of token ids.

`files` finds files, `rows` and `stored` read them row by row, `forms` makes a document of a row,
and `samples` makes samples of documents. `dataset` combines them.
"""
