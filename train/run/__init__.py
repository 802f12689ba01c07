"""What a run is beside its mathematics: its loop, its folder, its hosts and the machine that it runs on.

Read `loop` first (steps, checkpoints, logs, and what a resumed run is bound to), then `folder` (identity,
secrets, checkpoints), `hosts` (several processes), `machine` and `traces` (what a resumed run compares),
`trained` and `interrupts`.
"""
