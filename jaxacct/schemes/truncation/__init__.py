"""B-min-sep with batches truncated to a maximum size.

Read in this order:

* `truncated_b_min_sep`: the scheme, whose adversary sees the others' batch sizes;
* `truncated_batch_sizes`: draws of these sizes;
* `independent_truncation`: a pair that dominates and has likelihoods of its own.
"""
