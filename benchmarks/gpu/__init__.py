"""All checks and measurements that need a GPU, by one command, in parts of minutes.

    make gpu                             # all parts, the most important first
    make gpu ARGS="--part codec"         # one of them
    make gpu ARGS="--rehearse"           # the same on a CPU, with small shapes

`runner` runs each part in a process of its own and cuts it off; `report` stores its results.
"""
