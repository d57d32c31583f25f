"""The campaign behind `scripts/fault_campaign`: jobs are disturbed, resumed and compared with undisturbed runs.

`jobs` makes random jobs, `processes` starts and finds what they run, `kinds` has the faults, `rounds` runs a round and
judges it, `readers` looks at the output while it is written.
"""
