"""Likelihood ratios that are no sampling table's, or are computed in another way.

Read in this order:

* `epochs`: one participation an epoch, a product of blocks;
* `interacting_recurrence`: several processes whose participations interact;
* `gpu_recurrence`: a table's recurrence as one Pallas kernel.
"""
