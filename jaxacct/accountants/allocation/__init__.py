"""One participation at a uniform step of an epoch (C = I), without samples.

Read in this order:

* `lognormal_lattice`: a lognormal on a lattice, in convex order above;
* `lognormal_sums`: the divergence of their sum, at one epsilon or at many, from above;
* `random_allocation`: the accountant of one epoch;
* `redrawn_bins`: the accountant of several epochs, composed.
"""
